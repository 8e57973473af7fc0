"""A lake on disk: open or create it, read its state, and commit to it."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import msgspec

from contrail_spark.errors import LakeConflictError, LakeError, LakeNotFoundError
from contrail_spark.lake import files
from contrail_spark.lake.layout import (
    DATA,
    LAKE_FILE,
    MANIFEST,
    TEMPORARY,
    DataFile,
    commit_name,
    parse_commit_name,
    parse_data_path,
    parse_temporary_name,
    temporary_name,
)
from contrail_spark.lake.manifest import (
    CHECKPOINT_EVERY,
    REMOVED_KEPT_US,
    Commit,
    FileEntry,
    LakeInfo,
    State,
    apply,
    checkpoint_of,
    decode,
    decode_info,
    encode,
    is_garbage,
    restored,
)


class Lake:
    """The lake in a folder. All methods raise LakeError for what is damaged."""

    def __init__(self, root: Path, info: LakeInfo) -> None:
        self.root = root
        self.info = info

    @classmethod
    def open(cls, root: str | Path) -> "Lake":
        """Open an existing lake. Raises LakeNotFoundError if there is none."""
        # Workers of Spark run in other folders.
        root = Path(root).absolute()
        where = root / LAKE_FILE
        with _as_lake_error():
            try:
                content = where.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise LakeNotFoundError(f"there is no lake in {root}") from None
        return cls(root, decode_info(content, str(where)))

    @classmethod
    def ensure(cls, root: str | Path, stream: str, incarnation: str, token: int | None) -> "Lake":
        """Open the lake of a stream, or create it.

        Raises LakeError if the folder holds something else: another stream, the same stream before
        it was re-created, another partitioning, or no lake at all.
        """
        root = Path(root).absolute()
        info = LakeInfo(
            stream=stream, incarnation=incarnation, token=token, created_us=time.time_ns() // 1_000
        )
        try:
            lake = cls.open(root)
        except LakeNotFoundError:
            with _as_lake_error():
                # Only now is it known which folder a path such as new/../old is.
                cls.check_new(root)
                files.make_folders(root)
                cls.check_new(root)
                for folder in (MANIFEST, TEMPORARY):
                    files.make_folders(root / folder)
                temporary = _temporary(root, 0)
                # If another job is faster, its lake may be that of another stream.
                # It may also have cleaned up already.
                with suppress(FileExistsError, FileNotFoundError):
                    files.create(root / LAKE_FILE, msgspec.json.encode(info) + b"\n", temporary)
            lake = cls.open(root)
        lake.check(stream, incarnation, token)
        return lake

    @classmethod
    def check_new(cls, root: Path) -> None:
        """Raise LakeError if no lake can begin in a folder, which need not exist."""
        with _as_lake_error(), suppress(FileNotFoundError):
            names = set(os.listdir(root))
            if LAKE_FILE in names:
                return  # another job was faster
            # Commits without lake.json are those of a lake that has lost it.
            begun = MANIFEST in names and any(map(parse_commit_name, os.listdir(root / MANIFEST)))
            if begun or names - {MANIFEST, TEMPORARY}:
                raise LakeError(f"{root} has other files and no lake")

    def check(self, stream: str, incarnation: str, token: int | None) -> None:
        """Raise LakeError unless the lake holds this stream, partitioned like this."""
        self.check_stream(stream, incarnation)
        if self.info.token != token:
            raise LakeError(
                f"the lake in {self.root} is partitioned by {_partitioning(self.info.token)}, not "
                f"by {_partitioning(token)}"
            )

    def check_stream(self, stream: str, incarnation: str) -> None:
        """Raise LakeError unless the lake holds this stream, and not an older one of its name."""
        if self.info.stream != stream:
            raise LakeError(
                f"the lake in {self.root} holds stream {self.info.stream}, not {stream}"
            )
        if self.info.incarnation != incarnation:
            raise LakeError(
                f"stream {stream} was deleted and created again since the lake in {self.root} was "
                "begun; archive it to another folder"
            )

    def state(self) -> State:
        """What the lake holds now."""
        with _as_lake_error():
            numbers = self._numbers()
            last = max(numbers, default=0)
            begin = last - last % CHECKPOINT_EVERY
            # An old manifest may be removed up to the newest checkpoint, but not after it.
            state = State()
            if begin:
                state = restored(self.commit_at(begin), str(self._commit_path(begin)))
            for number in range(begin + 1, last + 1):
                state = apply(state, self.commit_at(number))
            return state

    def commit_at(self, number: int) -> Commit:
        """One commit; LakeError if it is missing."""
        path = self._commit_path(number)
        with _as_lake_error():
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                raise LakeError(f"the lake in {self.root} is damaged: {path} is missing") from None
        return decode(content, number, str(path))

    def commit(self, state: State, change: Commit) -> State:
        """Make a change that was worked out from ``state``, and return the state after it.

        Raises LakeConflictError if another job has committed since: the lake is unchanged, and the
        files that were written for this commit can no longer be added.
        """
        after = apply(state, change)
        if change.number % CHECKPOINT_EVERY == 0:
            # A removed file is remembered until it is deleted.
            removed = after.removed.items()
            waiting = {path: at_us for path, at_us in removed if os.path.lexists(self.root / path)}
            after = replace(after, removed=waiting)
            change = msgspec.structs.replace(change, checkpoint=checkpoint_of(after))
        with _as_lake_error():
            temporary = self.temporary(change.number)
            try:
                files.create(self._commit_path(change.number), encode(change), temporary)
            except (FileExistsError, FileNotFoundError):
                # Also if a clean-up after the other commit has removed the temporary file.
                if self.has_commit(change.number):
                    raise LakeConflictError(
                        f"another job has changed the lake in {self.root} meanwhile"
                    ) from None
                raise
        return after

    def has_commit(self, number: int) -> bool:
        """True if a job has made this commit."""
        return self._commit_path(number).exists()

    def clean(self, keep_us: int = REMOVED_KEPT_US) -> int:
        """Delete all `leftovers`, and return the number of files."""
        found = self.leftovers(keep_us)
        with _as_lake_error():
            for path in found:
                path.unlink(missing_ok=True)
        return len(found)

    def leftovers(self, keep_us: int = REMOVED_KEPT_US) -> list[Path]:
        """Files that nothing can add to the lake any more: replaced ones, and those of killed jobs.

        A file that belonged to the lake is among them ``keep_us`` after it was removed from it.
        """
        found = []
        with _as_lake_error():
            now_us = time.time_ns() // 1_000
            # If nothing is kept, neither is what a machine whose clock is ahead has removed.
            removed_until_us = now_us - keep_us if keep_us else sys.maxsize
            state = self.state()
            for path in sorted((self.root / DATA).glob("date=*/**/*.parquet")):
                file = parse_data_path(path.relative_to(self.root).as_posix())
                if file is not None and is_garbage(file, state, removed_until_us):
                    found.append(path)
            for path in sorted((self.root / TEMPORARY).glob("*")):
                number = parse_temporary_name(path.name)
                if number is not None and number <= state.number:
                    found.append(path)
        return found

    def temporary(self, commit: int) -> Path:
        """A new path for a file that is being written for a commit.

        Makes its folder, which a copy of a lake may lack. Raises OSError.
        """
        files.make_folders(self.root / TEMPORARY)
        return _temporary(self.root, commit)

    def verify(self, entry: FileEntry) -> str | None:
        """What is wrong with a file of the lake, compared with its entry; None if nothing is."""
        path = self.root / entry.path
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                return f"{entry.path} has {size:,} bytes instead of {entry.bytes:,}"
            if files.sha256(path) != entry.sha256:
                return f"{entry.path} is damaged: its content does not match its checksum"
        except FileNotFoundError:
            return f"{entry.path} is missing"
        except OSError as error:
            return f"{entry.path} cannot be read: {error.strerror}"
        return None

    def publish(self, written: Path, file: DataFile, digest: str) -> DataFile:
        """Give a durable file below ``tmp`` the name of a data file; its old name remains.

        If a file of this name has the same content, because a job was killed and run again, that
        one is used; with other content the new file is a copy with a number.
        """
        with _as_lake_error():
            path = self.root / file.path
            files.make_folders(path.parent)
            try:
                files.publish(written, path)
            except FileExistsError:
                if files.sha256(path) != digest:
                    return self.publish(written, replace(file, copy=file.copy + 1), digest)
                # It may have been put there by a job that was killed before this.
                files.sync_folder(path.parent)
            return file

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.root / MANIFEST)
        except FileNotFoundError:
            raise LakeError(
                f"the lake in {self.root} is damaged: the folder {MANIFEST} is missing"
            ) from None
        return [number for name in names if (number := parse_commit_name(name))]

    def _commit_path(self, number: int) -> Path:
        return self.root / MANIFEST / commit_name(number)


def _temporary(root: Path, commit: int) -> Path:
    return root / TEMPORARY / temporary_name(commit, uuid4().hex)


def _partitioning(token: int | None) -> str:
    return "day" if token is None else f"day and subject token {token}"


@contextmanager
def _as_lake_error() -> Iterator[None]:
    """Make an error of the disk one sentence with the path."""
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or "the lake"
        raise LakeError(f"{where}: {error.strerror or error}") from error

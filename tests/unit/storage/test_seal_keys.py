"""Node keys, data keys and sealed bytes: what opens, what never does, which numbers are used."""

import base64
import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import (
    NodeFileDamagedError,
    NodeIdentity,
    copy_of,
    read_node_file,
    save_identity,
    write_node_file,
)
from contrail_storage.seal.frames import HEAD_BYTES, SEAL_BYTES, SealBrokenError
from contrail_storage.seal.key_table import (
    WrappedKey,
    WrongNodeKeyError,
    decode_table,
    encode_table,
    unwrap_key,
    wrap_key,
)
from contrail_storage.seal.keyring import KEYS_NAME, Keyring, KeysRefusedError, find_keyring
from contrail_storage.seal.node_keys import NODE_KEYS_MAX, NodeKeyError, parse_node_keys
from tests.support.each import each
from tests.unit.storage.wal_disk import PowerCutError, SimDisk

ROOT = Path("/data")
FIRST, SECOND, THIRD = (bytes([number]) * 32 for number in (1, 2, 3))
NONCE = bytes(12)
CONTEXT = b"here"

keys = st.binary(min_size=32, max_size=32)


def new_keyring(disk: Files | None = None, seals_max: int = 1 << 32) -> Keyring:
    return Keyring.create(disk or SimDisk(), ROOT, FIRST, seals_max)


# Node keys ---------------------------------------------------------------------------------------
@given(st.lists(st.tuples(keys, st.sampled_from(["hex", "HEX", "base64"])), min_size=1, max_size=4))
def test_keys_are_read_in_their_order_whatever_their_form(given: list[tuple[bytes, str]]) -> None:
    write: dict[str, Callable[[bytes], str]] = {
        "hex": bytes.hex,
        "HEX": lambda key: key.hex().upper(),
        "base64": lambda key: base64.b64encode(key).decode(),
    }
    text = "\n\n".join(f"  {write[form](key)}\r" for key, form in given)
    assert parse_node_keys(text) == tuple(key for key, _ in given)


@each(
    ("text", "complaint"),
    [
        ("", "no encryption key"),
        (" \n\n", "no encryption key"),
        ("00" * 31, "line 1 is not 32 bytes"),
        ("00" * 32 + "\n\n" + "0g" * 32, "line 3 is not 32 bytes"),
        (base64.b64encode(bytes(33)).decode(), "line 1"),
        ("ключ", "line 1"),
        ("\n".join(["00" * 32] * (NODE_KEYS_MAX + 1)), f"more than {NODE_KEYS_MAX}"),
    ],
)
def test_text_without_usable_keys_is_refused_and_not_shown(text: str, complaint: str) -> None:
    with pytest.raises(NodeKeyError, match=complaint) as refused:
        parse_node_keys(text)
    assert not any(line in str(refused.value) for line in text.split() if len(line) > 3)


# Data keys ---------------------------------------------------------------------------------------
@given(keys, keys, st.integers(1, 2**32 - 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_wrapped_key_is_the_same_after_all_and_unreadable_before(
    node_key: bytes, data_key: bytes, key_id: int, account: str
) -> None:
    entry = wrap_key(node_key, key_id, data_key, NONCE, account)
    assert decode_table(encode_table((entry,))) == (entry,)
    assert data_key not in encode_table((entry,))
    assert unwrap_key(node_key, entry) == data_key


@each(
    "changed",
    [
        wrap_key(SECOND, 7, THIRD, NONCE),
        WrappedKey(8, "default", NONCE, wrap_key(FIRST, 7, THIRD, NONCE).wrapped),
        WrappedKey(7, "other", NONCE, wrap_key(FIRST, 7, THIRD, NONCE).wrapped),
        WrappedKey(7, "default", b"1" * 12, wrap_key(FIRST, 7, THIRD, NONCE).wrapped),
        WrappedKey(7, "default", b"", wrap_key(FIRST, 7, THIRD, NONCE).wrapped),
        WrappedKey(7, "default", NONCE, b""),
    ],
    ids=["another node key", "id", "account", "nonce", "no nonce", "nothing wrapped"],
)
def test_entry_does_not_unwrap_when_anything_of_it_is_another(changed: WrappedKey) -> None:
    with pytest.raises(WrongNodeKeyError):
        unwrap_key(FIRST, changed)


@each(
    "entries",
    [(), (2, 1), (1, 1)],
)
def test_table_without_order_is_none(entries: tuple[int, ...]) -> None:
    table = tuple(wrap_key(FIRST, number, THIRD, NONCE) for number in entries)
    with pytest.raises(ValueError, match="order"):
        decode_table(encode_table(table))


# Sealing -----------------------------------------------------------------------------------------
@given(st.binary(max_size=100), st.binary(max_size=20))
def test_sealed_bytes_open_where_they_were_sealed_and_nowhere_else(
    plain: bytes, context: bytes
) -> None:
    keyring = new_keyring()
    sealed = keyring.seal(plain, context)
    assert len(sealed) == len(plain) + SEAL_BYTES
    assert keyring.open(sealed, context) == plain
    assert keyring.open(memoryview(sealed), context) == plain
    with pytest.raises(SealBrokenError):
        keyring.open(sealed, context + b"!")


@given(st.binary(min_size=1, max_size=30), st.data())
def test_any_changed_bit_and_any_cut_is_noticed(plain: bytes, draw: st.DataObject) -> None:
    keyring = new_keyring()
    sealed = bytearray(keyring.seal(plain, CONTEXT))
    with pytest.raises(SealBrokenError):
        keyring.open(bytes(sealed[: draw.draw(st.integers(0, len(sealed) - 1))]), CONTEXT)
    at = draw.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[at // 8] ^= 1 << at % 8
    with pytest.raises(SealBrokenError):
        keyring.open(bytes(sealed), CONTEXT)


def test_no_nonce_comes_twice_over_threads_limits_rotations_and_restarts() -> None:
    disk = SimDisk()
    every: list[bytes] = []
    keyring = new_keyring(disk, seals_max=50)
    for life in range(3):
        node_key = bytes([life + 10]) * 32

        def work(used: Keyring = keyring) -> None:
            every.extend(used.seal(b"x", CONTEXT) for _ in range(400))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        keyring.rotate(node_key)
        for thread in threads:
            thread.join()
        keyring = Keyring.load(disk, ROOT, [node_key], seals_max=50)
    nonces = {sealed[:HEAD_BYTES] for sealed in every}
    assert len(nonces) == len(every) == 3 * 4 * 400
    assert {keyring.open(sealed, CONTEXT) for sealed in every} == {b"x"}


def test_data_key_seals_no_more_often_than_its_limit() -> None:
    keyring = new_keyring(seals_max=3)
    sealed = [keyring.seal(b"%d" % number, CONTEXT) for number in range(7)]
    assert [one[:4].hex() for one in sealed] == ["00000001"] * 3 + ["00000002"] * 3 + ["00000003"]
    assert [keyring.open(one, CONTEXT) for one in sealed] == [b"%d" % n for n in range(7)]


def test_start_that_seals_nothing_makes_no_data_key_and_one_that_does_makes_one() -> None:
    disk = SimDisk()
    before = new_keyring(disk).seal(b"before", CONTEXT)
    content = disk.read(ROOT / KEYS_NAME)
    keyring = Keyring.load(disk, ROOT, [FIRST])
    assert keyring.open(before, CONTEXT) == b"before"
    assert disk.read(ROOT / KEYS_NAME) == content
    after = keyring.seal(b"after", CONTEXT)
    assert after[:4] != before[:4]
    again = Keyring.load(disk.survivor(), ROOT, [FIRST])
    assert [again.open(one, CONTEXT) for one in (before, after)] == [b"before", b"after"]


def test_bytes_of_an_unknown_data_key_do_not_open() -> None:
    sealed = new_keyring().seal(b"x", CONTEXT)
    with pytest.raises(SealBrokenError):
        new_keyring().open(sealed, CONTEXT)  # the same id, another key
    with pytest.raises(SealBrokenError, match="data key 9"):
        new_keyring().open(b"\0\0\0\x09" + sealed[4:], CONTEXT)


# Rotation ----------------------------------------------------------------------------------------
def test_after_a_rotation_the_new_node_key_alone_opens_old_and_new() -> None:
    disk = SimDisk()
    keyring = new_keyring(disk)
    before = keyring.seal(b"before", CONTEXT)
    assert keyring.rotate(SECOND)
    after = keyring.seal(b"after", CONTEXT)
    assert after[:4] != before[:4]  # with a data key that the old node key never wrapped
    again = Keyring.load(disk.survivor(), ROOT, [SECOND])
    assert [again.open(one, CONTEXT) for one in (before, after)] == [b"before", b"after"]
    with pytest.raises(KeysRefusedError):
        Keyring.load(disk, ROOT, [FIRST])


def test_rotation_to_the_current_key_changes_nothing() -> None:
    disk = SimDisk()
    keyring = new_keyring(disk)
    calls = disk.calls
    assert not keyring.rotate(FIRST)
    assert disk.calls == calls


def test_closed_keyring_opens_and_seals_but_changes_its_file_no_more() -> None:
    disk = SimDisk()
    keyring = new_keyring(disk, seals_max=2)
    keyring.close()
    assert keyring.open(keyring.seal(b"x", CONTEXT), CONTEXT) == b"x"
    calls = disk.calls
    with pytest.raises(OSError, match="stopped"):
        keyring.rotate(SECOND)
    keyring.seal(b"x", CONTEXT)
    with pytest.raises(OSError, match="stopped"):
        keyring.seal(b"x", CONTEXT)  # it would take another data key
    assert disk.calls == calls


@each("call", ["create", "write", "sync"])
def test_rotation_that_the_disk_refuses_leaves_everything_as_it_was(call: str) -> None:
    disk = SimDisk()
    keyring = new_keyring(disk)
    disk.fail(call, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        keyring.rotate(SECOND)
    sealed = keyring.seal(b"x", CONTEXT)
    assert Keyring.load(disk.survivor(), ROOT, [FIRST]).open(sealed, CONTEXT) == b"x"
    disk.heal()
    assert keyring.rotate(SECOND)
    assert Keyring.load(disk.survivor(), ROOT, [SECOND]).open(sealed, CONTEXT) == b"x"


def test_power_cut_anywhere_in_a_rotation_leaves_one_of_the_two_keys_in_charge() -> None:
    opened_by = set()
    for cut_at in range(1, 12):
        disk = SimDisk()
        sealed = new_keyring(disk).seal(b"x", CONTEXT)
        keyring = Keyring.load(disk, ROOT, [FIRST])
        disk.cut_at = disk.calls + cut_at
        with contextlib.suppress(PowerCutError):
            keyring.rotate(SECOND)
        for keep in (0.0, 1.0):
            after = disk.survivor(keep)
            for name, node_key in (("first", FIRST), ("second", SECOND)):
                try:
                    held = Keyring.load(after, ROOT, [node_key])
                except KeysRefusedError:
                    continue
                assert held.open(sealed, CONTEXT) == b"x"
                opened_by.add(name)
                break
            else:
                pytest.fail(f"nothing opens it after a cut at {cut_at}")
    assert opened_by == {"first", "second"}


# Folders -----------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Keyring.create(Files(), tmp_path, FIRST)
    save_identity(Files(), tmp_path, NodeIdentity("n1", 1, encrypted=True))
    return tmp_path


@pytest.mark.parametrize("given", [(FIRST,), (SECOND, FIRST), (SECOND, THIRD, FIRST)])
def test_folder_opens_with_its_key_wherever_it_stands(
    folder: Path, given: tuple[bytes, ...]
) -> None:
    assert find_keyring(Files(), folder, given) is not None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [((), "no encryption key was given"), ((SECOND, THIRD), "given encryption keys opens it")],
)
def test_encrypted_folder_is_refused_without_its_key(
    folder: Path, given: tuple[bytes, ...], complaint: str
) -> None:
    with pytest.raises(KeysRefusedError, match=complaint):
        find_keyring(Files(), folder, given)
    (folder / "identity").unlink()  # as after a crash in the making
    copy_of(folder / "identity").unlink()
    with pytest.raises(KeysRefusedError, match=complaint):
        find_keyring(Files(), folder, given)


def test_folder_without_its_data_keys_is_damaged_not_plain(folder: Path) -> None:
    (folder / KEYS_NAME).unlink()
    assert find_keyring(Files(), folder, (FIRST,)) is not None
    copy_of(folder / KEYS_NAME).unlink()
    with pytest.raises(NodeFileDamagedError, match="missing"):
        find_keyring(Files(), folder, (FIRST,))


@pytest.mark.parametrize("payload", [b"", b"\x90", b"\x91\x01", b"\xc1"])
def test_data_keys_that_do_not_decode_are_damage(folder: Path, payload: bytes) -> None:
    write_node_file(Files(), folder / KEYS_NAME, payload)
    with pytest.raises(NodeFileDamagedError):
        find_keyring(Files(), folder, (FIRST,))


def test_data_keys_of_which_one_was_exchanged_are_damage(folder: Path) -> None:
    path = folder / KEYS_NAME
    entries = decode_table(read_node_file(Files(), path))
    strange = wrap_key(SECOND, 2, THIRD, NONCE)
    write_node_file(Files(), path, encode_table((*entries, strange)))
    with pytest.raises(NodeFileDamagedError, match="data key 2"):
        find_keyring(Files(), folder, (FIRST, SECOND))


@pytest.mark.parametrize("made", ["identity", "log alone"])
def test_plain_folder_is_refused_when_keys_are_given_and_served_without(
    tmp_path: Path, made: str
) -> None:
    if made == "identity":
        save_identity(Files(), tmp_path, NodeIdentity("n1", 1))
    else:
        (tmp_path / "wal").mkdir()
    with pytest.raises(KeysRefusedError, match="new folder"):
        find_keyring(Files(), tmp_path, (FIRST,))
    assert find_keyring(Files(), tmp_path, ()) is None
    assert KEYS_NAME not in {path.name for path in tmp_path.iterdir()}


def test_new_folder_has_no_keyring_yet(tmp_path: Path) -> None:
    assert find_keyring(Files(), tmp_path, (FIRST,)) is None
    assert find_keyring(Files(), tmp_path, ()) is None

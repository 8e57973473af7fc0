"""Options of opening a node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from contrail_common.timeunits import NS_PER_S
from contrail_storage.core.group_table import GroupEntry
from contrail_storage.core.node_table import NodeEntry
from contrail_storage.disk.files import Files
from contrail_storage.physical_memory import eighth_of_memory, quarter_of_memory
from contrail_storage.replica.applier import MERGE_BLOCKS
from contrail_storage.replica.elsewhere import Ask
from contrail_storage.replica.log_time import Clocks
from contrail_storage.store.directory_pages import PAGE_BLOCKS
from contrail_storage.store.rocks_store import RocksStore
from contrail_storage.upkeep.compactor import CompactorBounds
from contrail_storage.upkeep.eraser import EraseBounds
from contrail_storage.wal import LogOptions

_SEGMENT_BYTES: Final = 16 << 20
"""Log segments are removed as a whole, so small ones leave a restart little to replay."""


@dataclass(slots=True, frozen=True)
class Cluster:
    """The nodes of a cluster as they were formed, and the groups that they will have."""

    nodes: tuple[str, ...]
    """The names of all nodes. Position and number agree: the first node has number 1."""
    groups: tuple[GroupEntry, ...]
    ask: Ask
    """Asks `Membership.answer` of another node."""
    fetch: Ask
    """Asks `Membership.provide` of another node, for answers of up to 1 MiB, 4 at a time."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """The peer address of each node, by name."""
    note_start: Callable[[NodeEntry], None] = lambda _: None
    """Lets no older start of another node connect from now on; connects as this start of its own.

    That is known when the folder can be written, which may be later than the first connection.
    """
    process: int = 0
    """Tells this process from all others of the node."""


@dataclass(slots=True, frozen=True)
class NodeOptions:
    """Where a node keeps its data, and limits that tests make small.

    ``name`` is the node's name in answers and logs; it may change from start to start.
    ``node_keys`` (32 bytes each, the current one first) open an encrypted folder.
    ``memory_max_bytes`` limits all streams in memory together, ``cache_max_bytes`` the cache of
    blocks. ``accept_data_loss`` opens a damaged folder with what can be read of it.
    ``publish_timeout_s`` is how long a caller waits for the log at most. ``clock_jump_max_ns`` is
    how far the wall clock may be ahead at a start: see `LogTime`. Without ``cluster``, the node is
    alone.
    """

    data_dir: Path
    name: str = "n1"
    node_keys: tuple[bytes, ...] = ()
    log: LogOptions = field(default_factory=lambda: LogOptions(_SEGMENT_BYTES, keep_bytes=0))
    checkpoint_bytes: int = 64 << 20
    merge_blocks: int = MERGE_BLOCKS
    page_blocks: int = PAGE_BLOCKS
    scrub_bytes_s: int = 8 << 20
    scrub_pause_s: float = 3_600.0
    compactor: CompactorBounds = field(default_factory=CompactorBounds)
    erase: EraseBounds = field(default_factory=EraseBounds)
    accept_data_loss: bool = False
    memory_max_bytes: int = field(default_factory=quarter_of_memory)
    cache_max_bytes: int = field(default_factory=eighth_of_memory)
    publish_timeout_s: float = 30.0
    clock_jump_max_ns: int = 600 * NS_PER_S
    cluster: Cluster | None = None
    clocks: Clocks = field(default_factory=Clocks)
    files: Files | None = None
    open_store: Callable[[Path], RocksStore] = RocksStore.open_reading

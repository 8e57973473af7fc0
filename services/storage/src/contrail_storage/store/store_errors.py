"""The errors of the store. No caller needs to know those of RocksDB or of its binding."""


class StoreError(Exception):
    """An operation on the store did not succeed."""


class StoreStalledError(StoreError):
    """RocksDB is stalled by flushes or compactions. Nothing was written; try again later."""


class StoreFailedError(StoreError):
    """The disk failed, or the store could not be opened. Reopen it and replay the log."""


class StoreLockedError(StoreFailedError):
    """Another process has the store open."""


class StoreCorruptError(StoreError):
    """Stored bytes are not what was written."""


class StoreMissingError(StoreFailedError):
    """A file of the store is missing."""


class StoreScanCutError(StoreError):
    """The scan was ended because it kept files that had to be removed."""


class StoreClosedError(StoreError):
    """The store was closed."""

"""The cluster secret: the keys that are derived from it, and its change while the process runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from contrail_link.tcp.handshake import derived_key
from contrail_serve.settings import SecretSettings, SettingsError, read_cluster_secrets

LINK_LABEL: Final = "service link"
ACK_LABEL: Final = "ack tokens"
PEER_LABEL: Final = "peers"
"""Purposes for which keys are derived."""

_log: Final = structlog.get_logger("contrail.serve")


class ClusterSecret:
    """One or two secrets, the current one first, and the keys derived from them.

    Keys are given out as lists, which are changed in place when the file is read again.
    """

    def __init__(self, settings: SecretSettings) -> None:
        self._values: Sequence[bytes] = settings.values
        self.file: Path | None = settings.file
        """Where the secrets are; None if they came from the environment."""
        # The lists that were given out, by label.
        self._keys: dict[str, list[bytes]] = {}

    def keys(self, label: str) -> list[bytes]:
        """Return the keys for a purpose; the first is that of the current secret."""
        if label not in self._keys:
            self._keys[label] = [derived_key(one, label) for one in self._values]
        return self._keys[label]

    def read_again(self) -> None:
        """Take the secrets from the file. One that cannot be used is logged and changes nothing."""
        if self.file is None:
            return
        try:
            values = read_cluster_secrets(self.file)
        except SettingsError as error:
            _log.error("cluster_secret_refused", reason=str(error))
            return
        changed = values != self._values
        self._values = values
        for label, keys in self._keys.items():
            keys[:] = [derived_key(one, label) for one in values]
        _log.info("cluster_secret_changed" if changed else "cluster_secret_unchanged")

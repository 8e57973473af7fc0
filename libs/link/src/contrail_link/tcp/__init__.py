"""The service link over TCP: the methods of ``contrail_link.contract`` as frames between processes.

``frames``, ``handshake``, ``methods`` and ``refusals`` are pure; ``server`` answers with any
``StorageLink``, ``client`` is one.
"""

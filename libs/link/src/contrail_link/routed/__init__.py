"""``StorageLink`` over several storage nodes of a cluster.

``outcomes`` and ``listing`` are pure; ``leaders`` remembers who answered; ``search`` finds the node
for one request; ``publishing`` sends publishes again; ``link`` has the methods of the link.
"""

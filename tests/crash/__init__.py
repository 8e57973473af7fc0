"""Crash points, power cuts, failing disks and damaged files, over a storage node.

One process runs a script of calls and dies at a chosen write, sync or flush. The next process opens
the remaining data and looks at all of it. Both report every call with its outcome, and the ledger
judges that history.
"""

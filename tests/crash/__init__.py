"""Crash points, power cuts, failing disks and damaged files, over a storage node.

One process runs a script of calls and dies at a chosen write, sync or flush; the next one opens
what is left and looks at all of it. Both report every call and its outcome, and that history is
judged.
"""

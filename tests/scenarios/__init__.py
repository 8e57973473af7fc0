"""Stories of commands and what each answers, run against a storage node whose clock they set.

A story is a text of three kinds of lines: prose, commands behind ``>``, and below each command, set
in by two spaces, its output. ``CONTRAIL_UPDATE_SCENARIOS=1`` writes the outputs anew.
"""

"""Garbage collections in a server process: what lives long is looked at once."""

import subprocess
import sys
from textwrap import dedent


def run(script: str) -> None:
    """Run a script in a process of its own, because freezing concerns the whole process."""
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, timeout=60)


def test_what_a_long_collection_leaves_is_frozen_until_a_thaw() -> None:
    run(
        """
        import gc
        from contrail_serve.long_lived import short_collections

        kept = []
        with short_collections(long_s=0.0, thaw_after=3):
            for _ in range(3):
                for frozen in (True, True, False):
                    gc.collect(1)  # it is not a full one
                    before = gc.get_freeze_count()
                    kept.append([[] for _ in range(1_000)])
                    gc.collect()
                    if frozen:
                        assert gc.get_freeze_count() > before + 1_000
                    else:
                        assert gc.get_freeze_count() == 0
        gc.collect()
        assert gc.get_freeze_count() == 0
        """
    )


def test_short_collections_freeze_nothing() -> None:
    run(
        """
        import gc
        from contrail_serve.long_lived import short_collections

        with short_collections(long_s=60.0):
            gc.collect()
        assert gc.get_freeze_count() == 0
        """
    )


def test_nothing_is_collected_while_the_node_is_loaded() -> None:
    run(
        """
        import gc
        from contrail_serve.long_lived import uncollected

        seen = []
        gc.callbacks.append(lambda phase, info: seen.append(phase))
        with uncollected():
            made = [[] for _ in range(100_000)]
            assert not seen
        assert gc.get_freeze_count() >= len(made) and gc.isenabled()
        """
    )

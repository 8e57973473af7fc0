"""Tests of the figures of the structure, each on a small example."""

import itertools

from tests.checks import structure
from tests.checks.repository import File


def test_circles_are_found_once_each() -> None:
    arrows = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a"]}

    found = structure.circles(arrows)

    assert sorted("".join(sorted(set(circle))) for circle in found) == ["abc", "de"]
    assert all(
        later in arrows[earlier]
        for circle in found
        for earlier, later in itertools.pairwise(circle)
    )
    assert structure.circles({"a": ["b", "c"], "b": ["c"]}) == []


def test_packages_import_what_their_modules_import_of_the_packages_beside_them() -> None:
    arrows = {"p.a.one": {"p.b.two", "p.a.other", "p.top"}, "p.b.deep.three": {"p.a"}}
    packages = {"p", "p.a", "p.b", "p.b.deep"}

    assert structure.package_arrows(arrows, packages) == {"p.a": {"p.b"}, "p.b": {"p.a"}}


def test_comments_for_people_are_counted() -> None:
    text = "x = 1  # why\n# noqa: E501\n# Part ------\ny = '# text'\n# type: ignore\n# also\n"

    assert structure.comment_lines(File("a.py", text)) == 2


def test_names_and_verbs_with_several_owners_are_counted() -> None:
    owner = "class _Batch:\n    def append_batch_then(self): ...\n    def append_all(self): ...\n"
    folder = "services/storage/src/contrail_storage"
    files = [File(f"{folder}/{name}.py", owner) for name in ("node/a", "node/b", "wal/c")]

    assert structure.shared_names(files) == {"Batch": 3}
    assert structure.shared_names(files[:2]) == {}
    assert structure.publish_verbs(files) == [
        "contrail_storage.node.a.append_batch_then",
        "contrail_storage.node.b.append_batch_then",
    ]
    assert structure.fullest_folder(files) == (2, f"{folder}/node")

"""What is told of where a result comes from, and what is not."""

import pytest

from alignattn import provenance


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("No such file: '/home/me too/data/dev.tsv'", "No such file: '…/dev.tsv'"),
        ("PosixPath('/data/sst-2')", "PosixPath('…/sst-2')"),
        ("/home/me/models/bert lacks config.json (/home/me/models)", "…/bert lacks config.json (…/models)"),
        ("See https://host.org/a/b/c, 'https://host.org/a/b' and a/b/c", None),
        ("node 10.1.22.3 died with torch 2.13.0", "node … died with torch 2.13.0"),
        ("shapes 3/4/5 and b h n / m", None),
    ],
)
def test_folders_and_addresses_are_left_out(text, told):
    assert provenance.anonymous(text) == (text if told is None else told)

"""Every picture leaves things as they were."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    mpl = pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")
    from matplotlib._pylab_helpers import Gcf

    before = dict(mpl.rcParams)
    yield
    assert not Gcf.figs, "a figure is registered with pyplot"
    assert dict(mpl.rcParams) == before, "rcParams were changed"

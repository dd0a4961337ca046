"""The checks themselves: sound toy kernels pass all of them, each planted bug fails the one meant for it."""

import dataclasses
import re

import pytest
from msl_emulator import Failed, unavailable
from toy_kernels import BUGS, TOYS, Bug, Toy

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_sound_kernel_passes_every_check(toy: Toy):
    toy.check()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title.replace(" ", "-"))
def test_planted_bug_fails_its_check(bug: Bug):
    assert bug.toy.text.count(bug.old) or not bug.old, "the edit does not apply"
    broken = dataclasses.replace(bug.toy, text=bug.toy.text.replace(bug.old, bug.new), **dict(bug.launch))
    with pytest.raises(Failed) as failed:
        broken.check()
    assert failed.value.check == bug.check, failed.value
    assert re.search(bug.message, str(failed.value)), failed.value

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.found_checkpoint import Finished, FoundFile
from sidecar.core.lifecycle.save_profile import LONGEST_S, MARKER_RESOLUTION_S, save_profile, usual_profile
from trainer_hook.contract import META_RESTORED, Node, epoch_seconds, rfc3339

NOW_S = 1.8e9
ONE = Finished("checkpoint-20", "v", 20, None, "a", Node(), NOW_S, 8, (), {}, step_seconds=0.5)


@given(st.lists(st.floats(-100, 2 * LONGEST_S), max_size=5))
def test_a_save_took_as_long_as_from_its_first_file_to_its_marker(ages_s: list[float]) -> None:
    files = tuple(FoundFile(f"f{n}", 10, round((NOW_S - age_s) * 1e9), n) for n, age_s in enumerate(ages_s))
    profile = save_profile(replace(ONE, files=files))
    told_s = [NOW_S - file.mtime_ns / 1e9 for file in files]
    written_s = [max(age_s, 0.0) for age_s in told_s if -MARKER_RESOLUTION_S <= age_s <= LONGEST_S]
    assert profile.took_s == (max(written_s) if written_s else None)
    assert (profile.size_bytes, profile.step_seconds, profile.ranks) == (10 * len(files), 0.5, 8)


def test_a_file_counts_until_it_is_older_than_the_longest_save() -> None:
    for age_s, took_s in ((LONGEST_S, LONGEST_S), (LONGEST_S + 1, None)):
        file = FoundFile("model", 10, round((NOW_S - age_s) * 1e9), 0)
        assert save_profile(replace(ONE, files=(file,))).took_s == took_s


def test_a_save_within_the_millisecond_of_its_marker_took_no_time() -> None:
    created_at_s = epoch_seconds(rfc3339(NOW_S + 0.0009))  # as the marker tells it
    file = FoundFile("model", 10, round((NOW_S + 0.0008) * 1e9), 0)
    assert save_profile(replace(ONE, files=(file,), created_at_s=created_at_s)).took_s == 0
    at_the_limit = FoundFile("model", 10, round(MARKER_RESOLUTION_S * 1e9), 0)
    assert save_profile(replace(ONE, files=(at_the_limit,), created_at_s=0.0)).took_s == 0


def test_the_next_save_is_expected_to_be_like_the_newest_one_of_this_run() -> None:
    newer = replace(ONE, name="checkpoint-30", step=30, world_size=None)
    downloaded = replace(ONE, name="checkpoint-90", step=90, meta={META_RESTORED: "0" * 16})
    final = replace(ONE, name="final", step=40, world_size=2)
    usual = usual_profile([ONE, newer, downloaded, final])
    assert usual is not None
    assert usual.ranks == 1
    assert usual_profile([downloaded, final]) is None
    first, second = replace(ONE, name="checkpoint-0", step=0), replace(ONE, name="checkpoint-1", step=1, world_size=2)
    assert usual_profile([replace(first, created_at_s=NOW_S + 1), second]) == save_profile(second)

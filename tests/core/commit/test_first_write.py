"""Bodies of two pods for the keys of one step, on their way at once, in any order of arrival."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.first_write import is_first_write, shows_another_writer, taken_keys
from tests.core.commit.test_rewrite import NAME, entry, part

PATHS = ["a", "b"]
KEYS = [f"{NAME}/{path}" for path in PATHS]
keys_of_step = st.sampled_from(KEYS)


@dataclass
class Pod:
    """Sends each of its files until the store has it, while it may write."""

    name: str
    taken: set[str] = field(default_factory=set)
    in_flight: list[tuple[str, bool]] = field(default_factory=list)
    """Key, and whether the store is to refuse it if it has an object."""
    sent: int = 0

    def send(self, key: str) -> None:
        self.sent += 1
        self.in_flight.append((key, is_first_write(key, NAME, conditional=True, taken=self.taken, shared=())))

    def arrive(self, store: dict[str, str], number: int) -> bool:
        """Let a request arrive. Returns False if the store refuses it."""
        key, is_first = self.in_flight.pop(number % len(self.in_flight))
        if is_first and key in store:
            self.taken.add(key)
            return False
        store[key] = self.name
        return True


@given(leftovers=st.sets(keys_of_step), late=st.lists(keys_of_step, max_size=4), order=st.lists(st.integers(0, 9), max_size=20))
def test_what_a_replaced_pod_sent_for_an_absent_key_never_replaces_what_was_committed_since(
    leftovers: set[str], late: list[str], order: list[int]
) -> None:
    store = dict.fromkeys(leftovers, "left-over")
    replaced, later = Pod("replaced"), Pod("later")
    replaced.taken |= leftovers  # as a listing says
    for key in late:
        replaced.send(key)
    numbers = iter(order)
    for key in KEYS:
        while store.get(key) != "later":
            if replaced.in_flight and (number := next(numbers, 0)) % 3 == 0:
                replaced.arrive(store, number)
            later.send(key)
            later.arrive(store, 0)
    assert later.sent <= 2 * len(KEYS), "each body is refused once at most"
    while replaced.in_flight:
        key, is_first = replaced.in_flight[-1]
        arrived = replaced.arrive(store, len(replaced.in_flight) - 1)
        assert (store[key] == "later") is is_first is not arrived
        store[key] = "later"


@given(st.integers(1, 10))
def test_after_an_earlier_try_the_object_is_taken_for_our_own(tries: int) -> None:
    assert shows_another_writer(tries=tries) is (tries == 1)


@given(st.booleans(), st.sets(keys_of_step), st.sets(st.sampled_from(PATHS)), st.sampled_from(PATHS))
def test_only_a_store_that_can_refuse_is_asked_to_and_only_for_keys_not_known_to_be_taken(
    conditional: bool, taken: set[str], shared: set[str], path: str
) -> None:
    key = f"{NAME}/{path}"
    is_first = is_first_write(key, NAME, conditional=conditional, taken=taken, shared=shared)
    assert is_first is (conditional and key not in taken and path not in shared)


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=3), st.sets(st.sampled_from("abcd")))
def test_keys_of_earlier_manifests_and_of_damaged_files_are_taken(earlier: list[set[str]], damaged: set[str]) -> None:
    manifests = [
        part("1", "2026-01-01T00:00:00Z", [entry(path, b"x", f"{NAME}/.ckpt/1/node-00000/{path}") for path in sorted(paths)])
        for paths in earlier
    ]
    named = {f"{NAME}/.ckpt/1/node-00000/{path}" for paths in earlier for path in paths}
    assert taken_keys(NAME, manifests, damaged=damaged) == named | {f"{NAME}/{path}" for path in damaged}

from hypothesis import given
from hypothesis import strategies as st

from checkpoint import restore
from checkpoint.manifest import Generation
from checkpoint.restore import STORAGE, Copy, choose, complete, ordered, source, surplus

generations = st.builds(Generation, st.integers(1, 3), st.integers(1, 4), st.sampled_from(["aaaaaaaa", "bbbbbbbb"]))
copies = st.builds(
    Copy, generations, st.integers(0, 2), st.integers(1, 3), st.sampled_from(["n0", "n1", "n2", STORAGE]), st.just("n0")
).filter(lambda copy: copy.rank < copy.world_size)


def of(step: int, *ranks: int, world_size: int = 2, attempt: int = 1, token: str = "a" * 8, holder: str = "n0") -> list[Copy]:
    return [Copy(Generation(attempt, step, token), rank, world_size, holder, f"n{rank}") for rank in ranks]


def test_only_what_every_rank_saved_is_complete() -> None:
    assert complete(of(1, 0, 1) + of(2, 1)) == {Generation(1, 1, "a" * 8)}
    assert complete(of(1, 0) + of(1, 1, world_size=3)) == set()


def test_the_newest_complete_generation_is_chosen_and_the_reasons_are_told() -> None:
    chosen = choose(of(150, 0, 1) + of(200, 1) + of(250, 0, 1, 2, world_size=3), 2)
    assert chosen.generation == Generation(1, 150, "a" * 8)
    assert chosen.passed_over == (
        "step 250 was saved by 3 ranks and this job has 2",
        "of step 200 the shard of rank 0 is nowhere",
    )


def test_shards_of_two_starts_are_never_mixed() -> None:
    assert choose(of(7, 0, token="a" * 8) + of(7, 1, token="b" * 8), 2).generation is None
    assert choose(of(7, 0, attempt=1) + of(7, 1, attempt=2), 2).generation is None


def test_a_later_start_goes_before_a_later_step() -> None:
    assert choose(of(900, 0, 1, attempt=1) + of(150, 0, 1, attempt=2), 2).generation == Generation(2, 150, "a" * 8)


def test_many_missing_ranks_are_not_all_listed() -> None:
    (reason,) = choose(of(1, 0, world_size=64), 64).passed_over
    assert reason == "of step 1 the shard of rank 1, 2, 3, 4, 5, 6, 7, 8 and more is nowhere"


@given(st.lists(copies, max_size=30), st.integers(1, 3), st.sets(generations, max_size=3))
def test_what_is_chosen_is_whole_and_the_newest(found: list[Copy], world_size: int, exclude: set[Generation]) -> None:
    chosen = choose(found, world_size, exclude).generation
    whole = {
        g
        for g in {copy.generation for copy in found} - exclude
        if {copy.world_size for copy in found if copy.generation == g} == {world_size}
        and {copy.rank for copy in found if copy.generation == g} == set(range(world_size))
    }
    if whole:
        assert chosen is not None
        assert chosen >= max(whole)
    if chosen is not None:
        assert chosen not in exclude
        assert {c.rank for c in found if c.generation == chosen and c.world_size == world_size} == set(range(world_size))


def test_copies_are_tried_from_near_to_far() -> None:
    found = [copy for holder in (STORAGE, "n2", "n1", "n0") for copy in of(1, 0, holder=holder)]
    assert [copy.holder for copy in ordered(found, "n1")] == ["n1", "n0", "n2", STORAGE]


def test_where_a_copy_came_from_is_said_honestly() -> None:
    (mine,), (others,), (stored,) = of(1, 0, holder="n0"), of(1, 1, holder="n0"), of(1, 0, holder=STORAGE)
    assert [source(copy, "n0") for copy in (mine, others, stored)] == ["local", "neighbour", "storage"]
    assert source(mine, "n1") == "neighbour"


held = st.lists(generations, max_size=12, unique=True)


@given(held, st.sets(generations), st.none() | generations, st.sets(generations), st.integers(1, 3), st.sets(generations))
def test_what_would_be_restored_is_never_surplus(
    found: list[Generation],
    whole: set[Generation],
    safe: Generation | None,
    asked: set[Generation],
    keep: int,
    replicated: set[Generation],
) -> None:
    given_up = surplus(found, whole, safe, asked, keep, replicated)
    assert not given_up & {g for g in replicated if safe is None or g > safe}, "it may be the next safe one"
    assert given_up <= set(found)
    assert not given_up & set(sorted(set(found) & whole)[-keep:])
    assert safe not in given_up
    assert not given_up & {g for g in found if g not in asked and (safe is None or g > safe)}
    assert max(found, default=None) not in given_up or (safe is not None and max(found) < safe)


@given(st.integers(1, 40), st.integers(1, 3))
def test_memory_is_bounded_while_everything_is_well(count: int, keep: int) -> None:
    found = [Generation(1, step, "a" * 8) for step in range(1, count + 1)]
    assert len(set(found) - surplus(found, found, found[-1], found, keep)) <= keep
    assert len(set(found) - surplus(found, found, found[0], found, keep)) <= keep + 1


def test_a_generation_is_safe_when_every_shard_lies_in_two_places() -> None:
    once = of(1, 0, 1)
    assert restore.safe(once, 1) == {Generation(1, 1, "a" * 8)}
    assert restore.safe(once, 2) == set()
    assert restore.safe(once + of(1, 0, holder="n1"), 2) == set()
    assert restore.safe(once + of(1, 0, 1, holder="n1"), 2) == {Generation(1, 1, "a" * 8)}

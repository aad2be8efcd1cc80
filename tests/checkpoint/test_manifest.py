import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import manifest
from checkpoint.errors import Corrupt, UsageError
from checkpoint.manifest import CHUNK_BYTES, Generation, Key, Manifest, decode, generation, made_of

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
generations = st.builds(
    Generation, st.integers(0, 10**10 - 1), st.integers(0, 10**12 - 1), st.text("0123456789abcdef", min_size=8, max_size=8)
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    nbytes = draw(st.integers(0, 3 * CHUNK_BYTES))
    chunks = -(-nbytes // CHUNK_BYTES)
    digests = draw(st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), min_size=chunks, max_size=chunks))
    world_size = draw(st.integers(1, 9))
    key = Key(draw(st.text(max_size=9)), draw(generations), draw(st.integers(0, world_size - 1)))
    content = draw(st.dictionaries(st.text(max_size=9), values, max_size=3))
    return Manifest(key, world_size, draw(st.text(max_size=9)), nbytes, tuple(digests), content)


@given(manifests())
def test_a_manifest_comes_back(made: Manifest) -> None:
    assert decode(made.encode()) == made
    assert decode(made.encode().encode()) == made


@given(manifests(), st.data())
def test_a_changed_byte_is_noticed(made: Manifest, data: st.DataObject) -> None:
    text = bytearray(made.encode().encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(text))
    except Corrupt:
        return
    assert found == made  # a space that became a line break, a 1E5 that was a 1e5


@given(manifests(), st.data())
def test_a_truncated_manifest_is_noticed(made: Manifest, data: st.DataObject) -> None:
    text = made.encode()
    with pytest.raises(Corrupt):
        decode(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize("text", ["", "null", "[]", "17", "{}", '{"digest": 1}', "[[1, 2]]", b"\xff\xfe", "nonsense"])
def test_what_is_no_manifest_is_said_to_be_none(text: str | bytes) -> None:
    with pytest.raises(Corrupt):
        decode(text)


def test_a_newer_version_is_named() -> None:
    body = json.loads(Manifest(Key("j", Generation(1, 2, "0" * 8), 0), 1, "n", 0, (), {}).encode())
    with pytest.raises(Corrupt, match="version 2; this program reads version 1"):
        decode(json.dumps(body | {"version": 2}))


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    for wrong in (
        Manifest(Key("j", Generation(1, 2, "0" * 8), 3), 3, "n", 0, (), {}),
        Manifest(Key("j", Generation(1, 2, "0" * 8), 0), 3, "n", 9, (), {}),
        Manifest(Key("j", Generation(1, 2, "0" * 8), 0), 3, "n", -9, (), {}),
    ):
        with pytest.raises(Corrupt, match="contradicts itself"):
            decode(wrong.encode())


@given(st.lists(generations, max_size=9))
def test_texts_of_generations_sort_as_generations_do(found: list[Generation]) -> None:
    assert [generation(text) for text in sorted(map(str, found))] == sorted(found)


@pytest.mark.parametrize("text", ["", "latest", "1-2-3", f"{1:010d}-{2:012d}-ABCDEF00", f"{1:010d}-{2:012d}-abcdef00\n"])
def test_what_is_no_generation_is_said_to_be_none(text: str) -> None:
    with pytest.raises(Corrupt, match="is no generation"):
        generation(text)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_each_chunk_is_verified(nbytes: int) -> None:
    data = bytearray(i % 251 for i in range(1000)) * (nbytes // 1000 + 1)
    del data[nbytes:]
    made = manifest.made_of(Key("j", Generation(1, 2, "0" * 8), 0), 1, "n", {}, memoryview(data))
    manifest.verify(made, memoryview(data))
    for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        data[at] ^= 1
        start = at // CHUNK_BYTES * CHUNK_BYTES
        with pytest.raises(Corrupt, match=f"the bytes from {start} to {min(start + CHUNK_BYTES, nbytes)} are not"):
            manifest.verify(made, memoryview(data))
        data[at] ^= 1
    with pytest.raises(Corrupt, match=f"{nbytes + 1} bytes instead of {nbytes}"):
        manifest.verify(made, memoryview(bytes(data) + b"x"))


@pytest.mark.parametrize("name", ["job", "a.b", "llama-70B@2026:1", "x" * 128])
def test_names_of_jobs(name: str) -> None:
    assert manifest.check_job(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "x" * 129, "a\n", "../../etc"])
def test_what_is_no_name_of_a_job(name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a job"):
        manifest.check_job(name)


def test_a_digest_that_is_none_is_noticed_before_anything_is_compared_with_it() -> None:
    made = made_of(Key("job", Generation(1, 1, "abcdef00"), 0), 1, "n", {}, memoryview(b"x"))
    for digest in ("", "0" * 31, "g" * 32, made.digests[0].upper() + "A", "0" * 33):
        with pytest.raises(Corrupt, match="contradicts itself"):
            decode(replace(made, digests=(digest,)).encode())


def test_chunks_have_bounds_and_digests_of_their_own() -> None:
    data = memoryview(bytearray(2 * CHUNK_BYTES + 5))
    made = made_of(Key("job", Generation(1, 1, "abcdef00"), 0), 1, "n", {}, data)
    assert [made.bounds(number) for number in range(3)] == [
        (0, CHUNK_BYTES), (CHUNK_BYTES, 2 * CHUNK_BYTES), (2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 5),
    ]  # fmt: skip
    assert made.fits(0, data[:CHUNK_BYTES])
    data[CHUNK_BYTES] = 1
    assert made.fits(0, data[:CHUNK_BYTES])
    assert not made.fits(1, data[CHUNK_BYTES : 2 * CHUNK_BYTES])
    assert not made.fits(2, data[:CHUNK_BYTES])

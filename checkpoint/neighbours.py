"""The caches of the other nodes, as one cache sees them: what they hold, what is copied to them, and what they ask for."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from checkpoint import place, placement, questions
from checkpoint.errors import CannotRun, PeerError
from checkpoint.landing import Landing
from checkpoint.manifest import Generation, Key, Manifest, check_job, decode, generation
from checkpoint.memory import Slab
from checkpoint.protocol import Message
from checkpoint.restore import Copy
from checkpoint.transport import Link, Pace, Transport, region_of

if TYPE_CHECKING:
    from checkpoint.server import Cache, Shard

ASK_S, ASK_SLOW_S = 0.1, 2.0
"""Peers are asked what they hold this often while a generation is unfinished; ever more slowly while nothing comes of it."""
ASIDE_S = 30.0
"""What has landed of a copy stays for so long when its origin breaks off."""
CHECK_S = 10.0
"""Whoever is said to hold a copy is asked this often whether that is still so."""
_OTHER: Message = {"op": "refused", "why": "it holds another shard under that name; every job needs a name of its own"}


@dataclass
class Heard:
    """What the other nodes told of a job, and why some told nothing."""

    copies: list[Copy] = field(default_factory=list)
    storing: set[Generation] = field(default_factory=set)
    existing: set[Generation] = field(default_factory=set)
    attempt: int = 0
    problems: list[str] = field(default_factory=list)


class Neighbours:
    """Talks with the other nodes for a cache. All methods may be called from any thread."""

    def __init__(self, cache: "Cache", transport: Transport) -> None:
        self._cache = cache
        self.transport = transport
        self._domain = place.domain(cache.settings.domain)
        self._pace = Pace(cache.settings.replicate_rate_bytes)
        self._peers: dict[str, dict[str, str]] = {}
        self._aside: dict[Key, tuple[Landing, Slab]] = {}
        """Copies of which a part has landed and whose origin broke off."""

    def others(self, job: str) -> dict[str, str]:
        """Return the addresses of the other nodes of a job; the caller holds the cache's lock."""
        return {node: address for node, address in self._peers.get(job, {}).items() if node != self._cache.node}

    def meet(self, job: str, peers: dict[str, str]) -> set[str]:
        """Take over where the other nodes' caches are, and return which left the job; the caller holds the cache's lock."""
        lost = set(self._peers.get(job, {})) - set(peers)
        self._peers[job] = peers
        return lost

    def lacks(self, shard: "Shard") -> bool:
        """Whether fewer nodes hold a copy than should and could; the caller holds the cache's lock."""
        return len(shard.replicas) < min(self._cache.settings.replicas, len(self.others(shard.key.job)))

    # ---- what this node asks of others

    def replicate(self, shard: "Shard") -> None:
        """Have as many other nodes hold a copy of a verified shard as are wanted and there are.

        Raises
        ------
        PeerError
            Too few took it; each that did not is named with its reason.
        """
        cache = self._cache
        assert shard.manifest is not None
        with cache.changed:
            peers = self.others(shard.key.job)
            existing = cache.existing(shard.key.job)
            domains = {node: _domain(address) for node, address in self._peers.get(shard.key.job, {}).items()}
        if self._domain:
            domains[cache.node] = self._domain
        refusals = []
        for node in placement.placement(cache.node, domains, cache.settings.replicas):
            if node in shard.replicas:
                continue
            if len(shard.replicas) >= min(cache.settings.replicas, len(peers)):
                break
            try:
                questions.put(self.transport, peers[node], cache.port, shard.manifest, shard.data, existing, self._pace)
            except PeerError as error:
                refusals.append(f"{node}: {error}")
                continue
            with cache.changed:
                if node not in self.others(shard.key.job):
                    raise PeerError(f"{node} left the job while it took a copy")
                shard.replicas.add(node)
        with cache.changed:
            if self.lacks(shard):
                raise PeerError(f"no {'further' if shard.replicas else 'other'} node took a copy: " + "; ".join(refusals))
        cache.tell(shard.key, "replicated")

    def get(self, nodes: Iterable[str], key: Key, room: Callable[[Manifest], memoryview]) -> tuple[Landing | None, list[str]]:
        """Pull a shard that other nodes hold from all of them, as `questions.get` does."""
        with self._cache.changed:
            holders = {node: self._peers[key.job][node] for node in nodes if node in self._peers[key.job]}
        return questions.get(self.transport, holders, key, room, self._cache.settings.connections)

    def hear(self, job: str) -> Heard:
        """Return what all other nodes tell of a job, asked at the same time."""
        with self._cache.changed:
            peers = self.others(job)
        heard = Heard()
        if not peers:
            return heard
        with ThreadPoolExecutor(min(16, len(peers))) as pool:
            for node, asked in {n: pool.submit(questions.inventory, self.transport, a, job) for n, a in peers.items()}.items():
                try:
                    told = asked.result()
                except PeerError as error:
                    heard.problems.append(f"{node}: {error}")
                    continue
                # by the name under which it was asked, which is the one under which it is found again
                heard.copies += [Copy(c.generation, c.rank, c.world_size, node, c.origin) for c in told.copies]
                heard.storing |= told.storing
                heard.existing |= told.existing
                heard.attempt = max(heard.attempt, told.attempt)
        return heard

    def ask(self) -> None:
        """Find out, for ever, which generations exist and which are safe, while there are some of which this is not known."""
        cache, period_s = self._cache, ASK_S
        while True:
            with cache.changed:
                while not (unknown := cache.unknown()):
                    period_s = ASK_S
                    cache.changed.wait()
            learned = [cache.learn(job, superseded) for job, superseded in unknown.items()]
            period_s = ASK_S if any(learned) else min(2 * period_s, ASK_SLOW_S)
            time.sleep(ASK_S)
            with cache.changed:
                cache.changed.wait_for(cache.has_unasked, period_s - ASK_S)

    def check(self) -> None:
        """Ask, for ever, whoever is said to hold a copy whether that is still so; what is lost is copied again."""
        cache = self._cache
        while True:
            time.sleep(CHECK_S)
            with cache.changed:
                held = cache.replicated()
                asked = {(job, node): self.others(job)[node] for job, node in held if node in self.others(job)}
            for (job, node), address in asked.items():
                try:
                    told = questions.inventory(self.transport, address, job)
                except PeerError:
                    continue  # out of reach for a moment is not lost
                there = {Key(job, copy.generation, copy.rank) for copy in told.copies}
                with cache.changed:
                    for shard in held[job, node]:
                        if shard.key not in there:
                            cache.lost(shard, node)

    # ---- what others ask of this node

    def serve(self, link: Link) -> None:
        """Answer the questions of another node until it closes the link."""
        while (message := link.receive()) is not None:
            answer = {"inventory": self._tell_inventory, "put": self._take_copy, "get": self._give_copy}.get(message["op"])
            if answer is None:
                raise PeerError(f"{message['op']!r} is no question to a checkpoint cache")
            answer(link, message)

    def _tell_inventory(self, link: Link, message: Message) -> None:
        cache, job = self._cache, message["job"]
        shards = [(str(c.generation), c.rank, c.world_size, c.origin) for c in cache.held(job)]
        with cache.changed:
            storing = [str(begun) for begun in cache.storing(job)]
            existing = [str(known) for known in cache.existing(job)]
            attempt = cache.attempt(job)
        told = {"node": cache.node, "storing": storing, "existing": existing, "shards": shards, "attempt": attempt}
        link.send({"op": "inventory"} | told)

    def _take_copy(self, link: Link, message: Message) -> None:
        cache, manifest, region = self._cache, decode(message["manifest"]), region_of(message)
        check_job(manifest.key.job)
        if manifest.node == cache.node:
            link.send({"op": "refused", "why": f"it is called {cache.node}, too; every node needs a name of its own"})
            return
        existing = {generation(text) for text in message["existing"]}
        # the way by which this node knows that one, if it does: a node has several addresses
        known = place.peers(cache.settings.peers) | self._peers.get(manifest.key.job, {})
        address = known.get(manifest.node) or f"{link.host}:{int(message['port'])}"
        with cache.changed:
            cache.heard_of(manifest.key.job, existing)
        shard = cache.pinned(manifest.key)
        if shard is not None:
            same = shard.manifest == manifest
            cache.unpin(shard)
            link.send({"op": "have"} if same else _OTHER)
            return
        try:
            landing, slab = self._begin(manifest)
        except CannotRun as error:
            link.send({"op": "refused", "why": str(error)})
            return
        try:
            reader = partial(self.transport.reader, address, region, manifest)
            landing.draw(
                manifest.node, reader, cache.settings.connections,
                lambda: link.send({"op": "landing", "chunks": landing.given[manifest.node]}),
            )  # fmt: skip
        except BaseException:
            self._set_aside(landing, slab)
            raise
        if landing.missing:
            self._set_aside(landing, slab)
            link.send({"op": "corrupt", "why": "; ".join(landing.notes)})
            return
        shard = cache.keep(manifest, slab, "copies")  # somebody may have been faster
        same = shard.manifest == manifest
        cache.unpin(shard)
        link.send({"op": "held"} if same else _OTHER)

    def _begin(self, manifest: Manifest) -> tuple[Landing, Slab]:
        """Return where a copy lands: where it began to, if it broke off a moment ago.

        A slab may take seconds to make, so nobody holds the cache's lock meanwhile.
        """
        with self._cache.changed:
            aside = self._aside.pop(manifest.key, None)
        if aside is not None and aside[0].manifest == manifest:
            aside[0].forgive()
            return aside
        if aside is not None:
            self._cache.slabs.give("copies", aside[1])
        try:
            slab = self._cache.take("copies", manifest.nbytes, manifest.key.job)
        except CannotRun:
            with self._cache.changed:
                others = list(self._aside)
            if not others:
                raise
            for key in others:
                self._forget(key)
            slab = self._cache.take("copies", manifest.nbytes, manifest.key.job)
        return Landing(manifest, slab.view(manifest.nbytes)), slab

    def _set_aside(self, landing: Landing, slab: Slab) -> None:
        """Keep what has landed of a copy for a while: who broke off may come back and go on."""
        key = landing.manifest.key
        with self._cache.changed:
            if not landing.given or key in self._aside:
                self._cache.slabs.give("copies", slab)
                return
            self._aside[key] = landing, slab
        timer = threading.Timer(ASIDE_S, self._forget, (key, landing))
        timer.daemon = True
        timer.start()

    def _forget(self, key: Key, landing: Landing | None = None) -> None:
        """Give up what landed of a copy, if it is still that one."""
        with self._cache.changed:
            if key in self._aside and landing in (None, self._aside[key][0]):
                self._cache.slabs.give("copies", self._aside.pop(key)[1])

    def _give_copy(self, link: Link, message: Message) -> None:
        key = Key(message["job"], generation(message["generation"]), int(message["rank"]))
        shard = self._cache.pinned(key)
        if shard is None or shard.manifest is None:
            link.send({"op": "absent", "why": "it is not held here"})
            return
        region = self.transport.lend(shard.manifest, shard.data)
        try:
            link.send({"op": "shard", "manifest": shard.manifest.encode(), "region": region})
            while (told := link.receive()) is not None and told["op"] == "reading":
                pass
        finally:
            self.transport.take_back(region)
            self._cache.unpin(shard)


def _domain(address: str) -> placement.Domain:
    try:
        return place.split(address)[2]
    except ValueError:
        return ()  # it is told when that node is asked for something

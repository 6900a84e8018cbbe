"""Whatever is done in whatever order, a collection is a dict that can be searched."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlcd.collections.collection import Collection
from mlcd.collections.item import Item
from mlcd.errors import NotFound
from mlcd.types import unit_rows

DIMENSION = 6
VECTORS = unit_rows(np.random.default_rng(0).standard_normal((40, DIMENSION)))
IDS = st.sampled_from([f"i{n}" for n in range(6)])
METADATA = st.fixed_dictionaries(
    {}, optional={"n": st.integers(0, 5), "tags": st.lists(st.sampled_from("ab"))}
)
# Few ids and few vectors: that the same comes again is what has to happen often.
FILTERS = st.sampled_from(
    [
        None,
        {"field": "n", "ge": 2},
        {"not": {"field": "n", "eq": 3}},
        {"field": "tags", "eq": "a"},
        {"or": [{"field": "tags", "in": ["b"]}, {"field": "n", "lt": 1}]},
    ]
)


def holds(filter_, metadata):
    n, tags = metadata.get("n"), metadata.get("tags", [])
    return {
        None: lambda: True,
        "{'field': 'n', 'ge': 2}": lambda: n is not None and n >= 2,
        "{'not': {'field': 'n', 'eq': 3}}": lambda: n != 3,
        "{'field': 'tags', 'eq': 'a'}": lambda: "a" in tags,
        "{'or': [{'field': 'tags', 'in': ['b']}, {'field': 'n', 'lt': 1}]}": lambda: (
            "b" in tags or n == 0
        ),
    }[str(filter_) if filter_ else None]()


class Model(RuleBasedStateMachine):
    @initialize()
    def create(self):
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "0"
        self.collection = Collection.create(
            self.path, fingerprint="a" * 64, dimension=DIMENSION, background=False
        )
        self.expected = {}

    def teardown(self):
        self.collection.close()
        shutil.rmtree(self.folder)

    @rule(ids=st.lists(IDS, unique=True, max_size=4), vector=st.integers(0, 2), metadata=METADATA)
    def add(self, ids, vector, metadata):
        outcomes = self.collection.add(
            [Item(i, VECTORS[vector + n], metadata) for n, i in enumerate(ids)]
        )
        for n, (item_id, outcome) in enumerate(zip(ids, outcomes, strict=True)):
            after = (vector + n, metadata)
            before = self.expected.get(item_id)
            assert outcome == (
                "created" if before is None else "unchanged" if before == after else "updated"
            )
            self.expected[item_id] = after

    @rule(item_id=IDS, metadata=METADATA)
    def update(self, item_id, metadata):
        if item_id not in self.expected:
            with pytest.raises(NotFound):
                self.collection.update_metadata(item_id, metadata)
            return
        self.collection.update_metadata(item_id, metadata)
        self.expected[item_id] = (self.expected[item_id][0], metadata)

    @rule(item_id=IDS)
    def delete(self, item_id):
        if self.expected.pop(item_id, None) is None:
            with pytest.raises(NotFound):
                self.collection.delete(item_id)
        else:
            self.collection.delete(item_id)

    @rule()
    def reindex(self):
        self.collection.reindex()

    @rule()
    def restart(self):
        self.collection.close()
        self.collection = Collection.open(self.path, background=False)

    @rule()
    def crash(self):
        """The files as a power cut leaves them go on; who had them open is gone."""
        copy = self.path.with_name(str(int(self.path.name) + 1))
        shutil.copytree(self.path, copy)
        self.collection.close()
        self.path = copy
        self.collection = Collection.open(copy, background=False)

    @rule(query=st.integers(0, 39), top=st.integers(1, 14), filter_=FILTERS, exact=st.booleans())
    def search(self, query, top, filter_, exact):
        matching = {i: v for i, (v, metadata) in self.expected.items() if holds(filter_, metadata)}
        found = self.collection.search(VECTORS[query : query + 1], top, filter=filter_, exact=exact)
        matches = found.matches[0]
        assert found.matching == len(matching)
        assert len({match.id for match in matches}) == len(matches) == min(top, len(matching))
        cosine = {
            i: float(VECTORS[v].astype(np.float64) @ VECTORS[query]) for i, v in matching.items()
        }
        assert [m.similarity for m in matches] == pytest.approx(
            sorted(cosine.values())[::-1][:top], abs=1e-5
        )
        for match in matches:
            assert match.similarity == pytest.approx(cosine[match.id], abs=1e-5)
            assert match.metadata == self.expected[match.id][1]

    @invariant()
    def it_is_the_dict(self):
        items = {item.id: item for block in self.collection.items() for item in block}
        assert {i: item.metadata for i, item in items.items()} == {
            i: m for i, (_, m) in self.expected.items()
        }
        for item_id, (vector, metadata) in self.expected.items():
            assert (items[item_id].embedding == VECTORS[vector]).all()
            read = self.collection.get(item_id)
            assert ((read.embedding == VECTORS[vector]).all(), read.metadata) == (True, metadata)
        assert len(self.collection) == len(self.expected)


QUICK = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQuick = Model.TestCase
TestQuick.settings = QUICK

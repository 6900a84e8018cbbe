"""Data that earlier versions have stored are read, and stored again under the same names."""

import contextlib
import json

import pytest

from mlcd.service.errors import RecordDamaged
from mlcd.service.jobs.job import (
    Failure,
    JobProblem,
    JobSpec,
    failure_from_json,
    failure_to_json,
    job_from_json,
    job_to_json,
    record_from_json,
    record_to_json,
)

# As version 0.1.0 wrote them into `jobs.record` of SQLite and `record:ID` of Redis.
LABELING = (
    '{"id":"0660e862137ba7786b0a","spec":{"kind":"label","input":"/in","output":"/out/0","fingerprint":"aaaa",'
    '"centers":"cccc","top":3,"threshold":0.25,"embeddings":true},"state":"running","created_s":1795401054.387111,'
    '"key":"key:8254","version":3,"started_s":1795401054.3901796,"ended_s":null,"stage":"shard","pieces":2,"fresh":2,'
    '"again":[0],"rests":{"0":1795401058.3964531},"attempts":{"0":1,"1":1},"failed":[],"leases":{"723e2bf9a8fff3f7":'
    '{"worker":"w2","stage":"shard","piece":1,"attempt":1,"until_s":1795401654.3988755,"images":3,"done":0,'
    '"lease_s":600.0}},"shards":2,"shards_done":0,"images":8,"done":0,"failed_items":0,"damaged_files":0,'
    '"problem":null,"refusal":null,"busy_since_s":1795401054.3988755,"heard_s":1795401054.3988755,"images_per_s":null}'
)
EMBEDDING = (
    '{"id":"0660e86213b5ad17328e","spec":{"kind":"embed","input":"/in","output":"/out/1","fingerprint":"bbbb",'
    '"centers":null,"top":8,"threshold":null,"embeddings":false},"state":"queued","created_s":1795401054.4019659,'
    '"key":null,"version":1,"started_s":null,"ended_s":null,"stage":"plan","pieces":1,"fresh":0,"again":[],"rests":{},'
    '"attempts":{},"failed":[],"leases":{},"shards":null,"shards_done":0,"images":null,"done":0,"failed_items":0,'
    '"damaged_files":0,"problem":null,"refusal":null,"busy_since_s":0.0,"heard_s":0.0,"images_per_s":null}'
)
# As it wrote them into `events`.
EVENT = (
    '{"id":"0660e862137ba7786b0a","spec":{"kind":"label","input":"/in","output":"/out/0","fingerprint":"aaaa",'
    '"centers":"cccc","top":3,"threshold":0.25,"embeddings":true},"state":"running","created_s":1795401054.387111,'
    '"started_s":1795401054.3901796,"ended_s":null,"shards":2,"shards_done":0,"shards_failed":0,"images":8,"done":0,'
    '"failed_items":0,"damaged_files":0,"stage":"shard","collected":0,"indexed":0,"images_per_s":null,"problem":null}'
)
# What later versions add.
LATER = dict.fromkeys(("duplicates", "outliers", "balance", "hierarchical", "url_column"))
LATER |= {"issues": [], "keep": "first", "seed": 0, "report": False, "upload": None}
LABELS = {"top": 3, "threshold": 0.25, "embeddings": True, "centers": "cccc"}
LABELING_SPEC = JobSpec("label", "/in", "/out/0", fingerprint="aaaa", **LABELS)
EMBEDDING_SPEC = JobSpec("embed", "/in", "/out/1", fingerprint="bbbb")


def with_later(text):
    """Returns what an earlier version stored, with the defaults of what it did not know."""
    stored = json.loads(text)
    return {"owner": None} | stored | {"spec": stored["spec"] | LATER}


def unsealed(text):
    stored = json.loads(text)
    assert stored.pop("crc32") > 0
    return stored


@pytest.mark.parametrize(("text", "spec"), [(LABELING, LABELING_SPEC), (EMBEDDING, EMBEDDING_SPEC)])
def test_a_stored_job_is_read_and_stored_as_it_was(text, spec):
    job = record_from_json(text)
    assert job.spec == spec
    assert unsealed(record_to_json(job)) == with_later(text)


def test_a_stored_event_is_read_and_stored_as_it_was():
    job = job_from_json(EVENT)
    assert job.spec == LABELING_SPEC
    assert unsealed(job_to_json(job)) == with_later(EVENT)


@pytest.mark.parametrize("text", [LABELING, EMBEDDING])
def test_a_stored_job_of_which_one_bit_has_changed_is_damaged_or_as_it_was(text):
    job = record_from_json(text)
    sealed = record_to_json(job)
    for place in range(len(sealed)):
        for bit in range(8):
            changed = bytearray(sealed)
            changed[place] ^= 1 << bit
            with contextlib.suppress(RecordDamaged):
                assert record_from_json(bytes(changed)) == job


def test_damage_is_seen_in_events_and_failures_too():
    event = job_to_json(job_from_json(EVENT))
    failure = failure_to_json(Failure(1, 2, JobProblem("lost", "it was removed")))
    for sealed, old, new in ((event, b"/out/0", b"/out/1"), (failure, b"lost", b"most")):
        read = job_from_json if sealed is event else failure_from_json
        read(sealed)
        with pytest.raises(RecordDamaged):
            read(sealed.replace(old, new))

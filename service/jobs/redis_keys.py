"""Every key of the queue in Redis.

mlcd:jobs:
  record:ID          the record (JSON)
  events:ID          list of "NUMBER VIEW" (JSON), the last few
  sizes:ID           list of the shards' images
  failures:ID        hash of shards and why they have failed (JSON)
  all, state:STATE   sorted sets of ids, all of one score: by id
  due:FINGERPRINT    sorted set of ids by the moment from which they are due
  ended              sorted set of ids with nothing left to be done, by the moment of their end
  waiting            hash of ids and the pieces that wait
  name:NAME          the id of the job that holds it
  newest             the greatest id
  workers            sorted set by the moment until which they are taken to live
"""

from typing import Final

from mlcd.types import Fingerprint
from service.jobs.job import JobState

_PREFIX: Final = "mlcd:jobs:"
ALL: Final = f"{_PREFIX}all"
ENDED: Final = f"{_PREFIX}ended"
WAITING: Final = f"{_PREFIX}waiting"
NEWEST: Final = f"{_PREFIX}newest"
WORKERS: Final = f"{_PREFIX}workers"


def record_key(job_id: str) -> str:
    return f"{_PREFIX}record:{job_id}"


def events_key(job_id: str) -> str:
    return f"{_PREFIX}events:{job_id}"


def sizes_key(job_id: str) -> str:
    return f"{_PREFIX}sizes:{job_id}"


def failures_key(job_id: str) -> str:
    return f"{_PREFIX}failures:{job_id}"


def state_key(state: JobState) -> str:
    return f"{_PREFIX}state:{state}"


def due_key(fingerprint: Fingerprint) -> str:
    return f"{_PREFIX}due:{fingerprint}"


def name_key(name: str) -> str:
    return f"{_PREFIX}name:{name}"

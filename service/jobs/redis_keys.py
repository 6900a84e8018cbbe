"""Every key of the queue in Redis.

PREFIX (mlcd:jobs:):
  schema             the version of all this
  record:ID          the record (JSON)
  events:ID          list of "NUMBER VIEW" (JSON), the last few
  sizes:ID           list of the shards' images
  failures:ID        hash of shards and why they have failed (JSON)
  all, state:STATE   sorted sets of ids, all of one score: by id
  due:FINGERPRINT    sorted set of ids by the moment from which they are due
  ended              sorted set of ids with nothing left to be done, by the moment of their end
  waiting            hash of ids and the tasks that wait
  name:NAME          the id of the job that holds it
  newest             the greatest id
  beats              hash of workers and "WHEN UNTIL MODEL": the last heartbeat, and the time until
                     which the worker counts as live
"""

from dataclasses import dataclass

from mlcd.service.jobs.job import JobState
from mlcd.types import Fingerprint


@dataclass(frozen=True)
class Keys:
    """The keys of one queue. Queues with different prefixes share one database and nothing else."""

    prefix: str

    @property
    def schema(self) -> str:
        return f"{self.prefix}schema"

    @property
    def all(self) -> str:
        return f"{self.prefix}all"

    @property
    def ended(self) -> str:
        return f"{self.prefix}ended"

    @property
    def waiting(self) -> str:
        return f"{self.prefix}waiting"

    @property
    def newest(self) -> str:
        return f"{self.prefix}newest"

    @property
    def heartbeats(self) -> str:
        return f"{self.prefix}beats"

    def record(self, job_id: str) -> str:
        return f"{self.prefix}record:{job_id}"

    def events(self, job_id: str) -> str:
        return f"{self.prefix}events:{job_id}"

    def sizes(self, job_id: str) -> str:
        return f"{self.prefix}sizes:{job_id}"

    def failures(self, job_id: str) -> str:
        return f"{self.prefix}failures:{job_id}"

    def state(self, state: JobState) -> str:
        return f"{self.prefix}state:{state}"

    def due(self, fingerprint: Fingerprint) -> str:
        return f"{self.prefix}due:{fingerprint}"

    def name(self, name: str) -> str:
        return f"{self.prefix}name:{name}"

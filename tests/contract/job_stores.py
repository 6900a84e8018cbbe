"""The common steps of the tests of job stores."""

import time

from mlcd.service.jobs.job import JobProblem, JobSpec

MODEL, OTHER = "a" * 64, "b" * 64
SHORT_S, LONG_S = 0.2, 600.0
BROKEN = JobProblem("undecodable", "the shard is broken")
NO_JOB = "0" * 20


def spec(number=0, **changes):
    return JobSpec(
        **{"kind": "label", "input": "/in", "output": f"/out/{number}", "fingerprint": MODEL}
        | changes
    )


def submitted(store, number=0, **changes):
    return store.submit(spec(number, **changes))[0].id


def claim(store, worker="w", lease_s=LONG_S, models=(MODEL,)):
    return store.claim(worker, models, lease_s=lease_s)


def planned(store, sizes, number=0):
    """A job that has been cut into shards of so many images."""
    job_id = submitted(store, number)
    work = claim(store)
    assert (work.job_id, work.stage, work.shard, work.attempt) == (job_id, "plan", None, 1)
    store.finish_plan(work, sizes)
    return job_id


def finish(store, job_id):
    """Do all that can be claimed of the job; the tasks that were."""
    done = []
    while (work := claim(store)) is not None:
        assert work.job_id == job_id
        if work.stage == "plan":
            store.finish_plan(work, [10, 10])
        else:
            store.complete(work)
        done.append((work.stage, work.shard))
    return done


def pass_away():
    """Until leases of SHORT_S have ended."""
    time.sleep(SHORT_S * 1.2)


def store_view(store, job_id):
    job = store.get(job_id)
    return job.state, job.shards_done, job.done, job.failed_items

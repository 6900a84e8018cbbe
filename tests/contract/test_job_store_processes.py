"""One suite for every job store: many threads and processes at once, some of them killed."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.contract.job_stores import MODEL, claim, planned, spec, store_view, submitted

WORKER = """
import json, sys, time
from mlcd.errors import Unavailable
from mlcd.service.jobs.service import open_queue
from mlcd.service.settings import read_settings
store = open_queue(read_settings(json.loads(sys.argv[1])))
while True:
    try:
        work = store.claim("w", [sys.argv[2]], lease_s=1)
        time.sleep(0.01)
        if work is not None and work.stage == "plan":
            store.finish_plan(work, [1] * 60)
        elif work is not None:
            store.complete(work)
    except Unavailable:
        time.sleep(0.1)
"""


def test_no_two_claimers_get_the_same_task(opened):
    stores = [opened() for _ in range(4)]
    planned(stores[0], [1] * 60)
    start, taken = threading.Barrier(8), []

    def worker(number):
        start.wait()
        while (work := claim(stores[number % 4], f"w{number}")) is not None:
            taken.append(work)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(worker, range(8)))
    assert sorted(work.shard for work in taken) == list(range(60))
    assert len({work.lease for work in taken}) == 60


def test_submissions_with_one_key_at_one_moment_make_one_job(opened):
    stores = [opened() for _ in range(4)]
    start = threading.Barrier(8)

    def submit(number):
        start.wait()
        return stores[number % 4].submit(spec(1), key="k")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert len({job.id for job, _ in answers}) == 1
    assert [new for _, new in answers].count(True) == 1


def test_a_job_comes_to_its_end_whoever_is_killed(request, where, store):
    """kill -9 of both workers three times, and of Redis where it is there: every shard
    counts once.
    """
    job_id = submitted(store)

    def start():
        return subprocess.Popen([sys.executable, "-c", WORKER, json.dumps(where), MODEL])

    workers = [start(), start()]
    try:
        for num_done in (10, 20, 30):
            until(lambda num_done=num_done: store.get(job_id).shards_done >= num_done)
            for place, worker in enumerate(workers):
                worker.kill()
                worker.wait()
                workers[place] = start()
            if "redis_url" in where and num_done == 20:
                server = request.getfixturevalue("redis")
                server.stop()
                server.start()
        until(lambda: store.get(job_id).state not in ("queued", "running"))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert store_view(store, job_id) == ("succeeded", 60, 60, 0)


def until(condition):
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_processes_may_open_it_at_one_moment(where):
    """The first of them makes it."""
    code = (
        "import json, sys; from mlcd.service.jobs.service import open_queue; from mlcd.service.settings "
        "import read_settings;"
    )
    code += "sys.stdin.read(); open_queue(read_settings(json.loads(sys.argv[1]))).depth()"
    command = [sys.executable, "-c", code, json.dumps(where)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0] * 4

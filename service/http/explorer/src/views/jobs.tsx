// Jobs that workers do: the list, and beneath it the form that submits one.

import { useEffect, useState } from "preact/hooks";

import { askJson, query, Refused } from "../api";
import { FINISHED } from "../events";
import { useLoaded, usePages } from "../loaded";
import { Empty, Failure, Field, Heading, Loading, More } from "../parts";
import { changed, go, href, useRoute } from "../route";
import { count, counted, duration, percent, when } from "../text";
import type { Job, JobPage } from "../wire";
import { Submit } from "./submit";

const AGAIN_MS = 3000;
const STATES = ["queued", "running", "succeeded", "failed", "canceled"];

export function Jobs() {
  const state = useRoute().params.get("state");
  const paged = usePages(
    async (cursor, signal) => {
      const page = await askJson<JobPage>(`v1/jobs${query({ limit: 50, state, cursor })}`, { signal });
      return { rows: page.jobs, next: page.cursor, total: page.jobs.length };
    },
    [state],
  );
  const jobs = useLively(paged.rows, state);
  const none = paged.error instanceof Refused && paged.error.status === 409;
  if (none)
    return (
      <>
        <Heading>Jobs</Heading>
        <Empty title="This server takes no jobs">
          <p>
            Start it with <code>MLCD_JOBS__ROOTS=/data</code>, the folders that jobs may read and write, and a worker
            beside it with <code>mlcd worker</code>.
          </p>
        </Empty>
      </>
    );
  return (
    <>
      <div class="bar-of-tools">
        <Heading>Jobs</Heading>
        <div class="tools">
          <Field label="State">
            {(id) => (
              <select id={id} value={state ?? ""} onChange={(event) => go(changed({ state: event.currentTarget.value }))}>
                <option value="">all</option>
                {STATES.map((known) => (
                  <option key={known}>{known}</option>
                ))}
              </select>
            )}
          </Field>
        </div>
      </div>
      {paged.error && !paged.rows.length ? (
        <Failure error={paged.error} again={paged.again} />
      ) : (
        <>
          {!jobs.length && (paged.loading ? <Loading /> : <Empty title={state ? `No job is ${state}` : "No jobs yet"}><p>Submit one below.</p></Empty>)}
          <ul class="jobs" aria-label="Jobs">
            {jobs.map((job) => (
              <Row key={job.id} job={job} />
            ))}
          </ul>
          <More paged={paged} />
          {paged.first && <Submit /> /* not before the list, which would move it from under the mouse */}
        </>
      )}
    </>
  );
}

/** The newest jobs are looked at again while one of them is at work. */
function useLively(rows: Job[], state: string | null): Job[] {
  const [tick, setTick] = useState(0);
  const busy = rows.some((job) => !FINISHED.includes(job.state));
  const newest = useLoaded(
    busy && tick > 0 ? (signal) => askJson<JobPage>(`v1/jobs${query({ limit: 50, state })}`, { signal }) : null,
    [state, tick],
    { keep: true },
  );
  useEffect(() => {
    if (!busy) return;
    const timer = setInterval(() => document.hidden || setTick((ticks) => ticks + 1), AGAIN_MS);
    return () => clearInterval(timer);
  }, [busy]);
  const now = new Map(newest.value?.jobs.map((job) => [job.id, job]));
  return rows.map((job) => now.get(job.id) ?? job);
}

function Row({ job }: { job: Job }) {
  return (
    <li>
      <a href={href(["jobs", job.id])} class="job">
        <State job={job} />
        <span class="job-name">
          {job.kind} <bdi>{job.input}</bdi>
        </span>
        <span class="soft small">{when(job.created)}</span>
        <Progress job={job} />
      </a>
    </li>
  );
}

export const State = ({ job }: { job: Job }) => <span class={`state ${job.state}`}>{job.state}</span>;

export function Progress({ job }: { job: Job }) {
  const { images, done, failed_items, images_per_s, eta_s } = job.progress;
  const share = images ? done / images : FINISHED.includes(job.state) ? 1 : 0;
  return (
    <span class="progress">
      <progress max={1} value={share} aria-label={`${job.kind} job: done`} />
      <span class="soft small">
        {images === null ? "not yet listed" : `${percent(share)} of ${counted(images, "image")}`}
        {failed_items > 0 && ` · ${count(failed_items)} failed`}
        {images_per_s !== null && !FINISHED.includes(job.state) && ` · ${count(Math.round(images_per_s))}/s`}
        {eta_s !== null && !FINISHED.includes(job.state) && ` · ${duration(eta_s)} left`}
      </span>
    </span>
  );
}

// One job, live: progress, what failed and why, cancel and retry.

import { useState } from "preact/hooks";

import { ask, askJson, query } from "../api";
import { connection } from "../connection";
import { FINISHED, useJob } from "../events";
import { useLoaded } from "../loaded";
import { Failure, Heading, Loading, Once } from "../parts";
import { go, href } from "../route";
import { count, counted, when } from "../text";
import { download } from "../uploads";
import type { Failures, Info, Job } from "../wire";
import { Progress, State } from "./jobs";

const MOST_FAILURES = 200;

export function JobView({ id }: { id: string }) {
  const { job, error } = useJob(id);
  return (
    <>
      <p class="trail">
        <a href={href(["jobs"])}>Jobs</a>
      </p>
      <div class="bar-of-tools">
        <Heading>
          {job ? `${job.kind[0]!.toUpperCase()}${job.kind.slice(1)} job` : "Job"}
        </Heading>
        {job && <State job={job} />}
        {job && <Actions job={job} />}
      </div>
      {error && <Failure error={error} again={connection.refresh} />}
      {!job && !error && <Loading />}
      {job && <Described job={job} />}
      {job?.results && job.output && <Pictures collection={job.output} />}
      {job?.results && Object.keys(job.results).length > 0 && <Results files={job.results} />}
      {job && <Reasons job={job} />}
    </>
  );
}

function Actions({ job }: { job: Job }) {
  const [wrong, setWrong] = useState("");
  const change = async (path: string, method: string) => {
    try {
      await ask(path, { method });
      setWrong("");
      connection.refresh();
    } catch (error) {
      setWrong((error as Error).message);
    }
  };
  const path = `v1/jobs/${encodeURIComponent(job.id)}`;
  const failed = job.state === "failed" || job.state === "canceled" || job.progress.shards_failed > 0;
  return (
    <div class="tools">
      {!FINISHED.includes(job.state) && (
        <button type="button" onClick={() => change(path, "DELETE")}>
          Cancel
        </button>
      )}
      {FINISHED.includes(job.state) && failed && (
        <button type="button" onClick={() => change(`${path}/retry`, "POST")}>
          Retry
        </button>
      )}
      <span role="alert" class="wrong">
        {wrong}
      </span>
    </div>
  );
}

function Described({ job }: { job: Job }) {
  const { progress, problem } = job;
  const facts: [string, string | null][] = [
    ["Input", job.input],
    ["Output", job.output],
    ["Submitted", when(job.created)],
    ["Started", job.started && when(job.started)],
    ["Ended", job.ended && when(job.ended)],
    ["Stage", progress.stage],
    ["Shards", progress.shards === null ? null : `${count(progress.shards_done)} of ${count(progress.shards)}`],
    ["Failed images", progress.failed_items ? count(progress.failed_items) : null],
    ["Failed shards", progress.shards_failed ? count(progress.shards_failed) : null],
  ];
  return (
    <>
      <div role="status" class="live">
        <Progress job={job} />
      </div>
      {problem && (
        <div class="failure">
          <h2>{job.state === "failed" ? "Why it failed" : "What is in its way"}</h2>
          <p>{problem.message}</p>
          {problem.remedy && <p>{problem.remedy}</p>}
        </div>
      )}
      <dl class="metadata">
        {facts.map(
          ([name, value]) =>
            value && (
              <div key={name}>
                <dt>{name}</dt>
                <dd>
                  <bdi>{value}</bdi>
                </dd>
              </div>
            ),
        )}
      </dl>
    </>
  );
}

/** The way to the collection that a job on uploaded images made. */
function Pictures({ collection }: { collection: string }) {
  const look = async () => {
    const { centers } = await askJson<Info>("v1/info");
    connection.refresh(); // the collection is new to the other views
    go(href([centers ? "clusters" : "map"], { collection }));
  };
  return (
    <p class="tools">
      <button type="button" onClick={() => void look()}>
        Show the pictures
      </button>
    </p>
  );
}

/** The files of a job on uploaded images. */
function Results({ files }: { files: Record<string, string> }) {
  const [wrong, setWrong] = useState("");
  return (
    <section aria-labelledby="results">
      <h2 id="results">Results</h2>
      <p class="tools">
        {Object.entries(files).map(([format, id]) => (
          <button
            type="button"
            key={format}
            onClick={() => void download(id).catch((error: Error) => setWrong(error.message))}
          >
            {format}
          </button>
        ))}
        <span role="alert" class="wrong">
          {wrong}
        </span>
      </p>
    </section>
  );
}

/** Shards that were left aside, by the reason. */
function Reasons({ job }: { job: Job }) {
  const path = `v1/jobs/${encodeURIComponent(job.id)}/failures`;
  const failed = job.progress.shards_failed;
  const failures = useLoaded(
    failed ? (signal) => askJson<Failures>(`${path}${query({ limit: MOST_FAILURES })}`, { signal }) : null,
    [path, failed],
  );
  if (!failed) return null;
  return (
    <section aria-labelledby="reasons">
      <h2 id="reasons">Errors by reason</h2>
      <Once loaded={failures}>
        {({ failures: all }) => {
          const reasons = Map.groupBy(all, ({ problem }) => problem.code);
          return (
            <ul class="reasons">
              {[...reasons].map(([code, shards]) => (
                <li key={code}>
                  <details>
                    <summary>
                      <strong>{code}</strong>: {counted(shards.length, "shard")},{" "}
                      {counted(shards.reduce((sum, { images }) => sum + images, 0), "image")}
                    </summary>
                    <ul>
                      {shards.map(({ shard, problem }) => (
                        <li key={shard}>
                          shard {shard}: {problem.message}
                        </li>
                      ))}
                    </ul>
                  </details>
                </li>
              ))}
            </ul>
          );
        }}
      </Once>
    </section>
  );
}

// Server-sent events, by fetch: EventSource can send no key. A stream that ends before its job is
// opened again after the last event.

import { useEffect, useState } from "preact/hooks";

import { ask, Refused } from "./api";
import { connection } from "./connection";
import { useStore } from "./store";
import type { Job } from "./wire";

const AGAIN_MS = 1000;
export const FINISHED = ["succeeded", "failed", "canceled"];

/** The job as it changes; null until something is known. */
export function useJob(id: string): { job: Job | null; error: Error | null } {
  const [job, setJob] = useState<Job | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const epoch = useStore(connection.epoch);
  useEffect(() => {
    const gone = new AbortController();
    follow(id, gone.signal, (changed) => {
      setJob(changed);
      setError(null);
    }).catch((failed) => gone.signal.aborted || setError(failed));
    return () => gone.abort();
  }, [id, epoch]);
  return { job, error };
}

async function follow(id: string, signal: AbortSignal, onJob: (job: Job) => void): Promise<void> {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  onJob(await (await ask(path, { signal })).json());
  let last = "";
  for (;;) {
    try {
      const headers: Record<string, string> = last ? { "Last-Event-ID": last } : {};
      const answer = await ask(`${path}/events`, { signal, headers });
      if (answer.status === 204) return;
      for await (const event of eventsOf(answer)) {
        last = event.id;
        const job: Job = JSON.parse(event.data);
        onJob(job);
        if (FINISHED.includes(job.state)) return;
      }
    } catch (error) {
      // Too many streams are open: those that look at others will end.
      if (!(error instanceof Refused && error.status === 429)) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    if (signal.aborted) return;
  }
}

async function* eventsOf(answer: Response): AsyncGenerator<{ id: string; data: string }> {
  let text = "";
  try {
    for await (const part of answer.body!.pipeThrough(new TextDecoderStream())) {
      text += part;
      const blocks = text.split(/\r?\n\r?\n/);
      text = blocks.pop()!;
      for (const block of blocks) {
        const fields = new Map(block.split(/\r?\n/).map((line) => line.split(/: ?(.*)/s).slice(0, 2) as [string, string]));
        const data = fields.get("data");
        if (data !== undefined) yield { id: fields.get("id") ?? "", data };
      }
    }
  } catch (error) {
    // A stream breaks when its server goes; whether it has gone is found out by asking again.
    if ((error as Error).name === "AbortError") throw error;
  }
}

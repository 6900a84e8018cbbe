// Requests to the server that the page came from. The key stays in this module's memory.

import { connection } from "./connection";
import { store } from "./store";
import type { Problem } from "./wire";

export const key = store("");
/** Whether the server has refused a request for want of a key, or for a wrong one. */
export const locked = store(false);

export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly problem: Problem,
  ) {
    super(problem.detail);
  }
}

export class Unreachable extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

export interface Ask {
  method?: string;
  json?: unknown;
  body?: Blob | FormData;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

export const address = (path: string) => new URL(path, document.baseURI).href;

/** Raises Refused for an answer that is none, and Unreachable where there is none at all. */
export async function ask(path: string, asked: Ask = {}): Promise<Response> {
  const headers = new Headers(asked.headers);
  if (key.get()) headers.set("X-API-Key", key.get());
  if (asked.json !== undefined) headers.set("Content-Type", "application/json");
  const body = asked.json === undefined ? asked.body : JSON.stringify(asked.json);
  const method = asked.method ?? (body === undefined ? "GET" : "POST");
  let response: Response;
  try {
    response = await fetch(address(path), { method, headers, body, signal: asked.signal });
  } catch (error) {
    if (asked.signal?.aborted) throw error;
    connection.lost();
    throw new Unreachable();
  }
  if (response.ok) return response;
  const refusal = new Refused(response.status, await problemOf(response));
  if (response.status === 401) locked.set(true);
  throw refusal;
}

export async function askJson<T>(path: string, asked?: Ask): Promise<T> {
  return (await ask(path, asked)).json();
}

async function problemOf(response: Response): Promise<Problem> {
  try {
    const problem = await response.json();
    if (typeof problem.detail === "string") return problem;
    // The routes of files answer as OpenAI's do.
    const detail = problem.error?.message;
    if (typeof detail === "string") return { type: problem.error.code ?? "", title: "", detail };
  } catch {
    // A proxy answers with a page of its own.
  }
  const title = response.statusText || "No answer";
  return { type: "", title, detail: `The server answered ${response.status} ${title}.` };
}

export function query(params: Record<string, string | number | boolean | null | undefined>): string {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text && `?${text}`;
}

export const collectionPath = (name: string) => `v1/collections/${encodeURIComponent(name)}`;

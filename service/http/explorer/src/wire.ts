// The answers of the server that the page reads; mlcd/wire/ has them whole.

export interface Problem {
  type: string;
  title: string;
  detail: string;
}

export interface Info {
  model: string;
  fingerprint: string;
  dimension: number;
  engine: string;
  precision: string;
  version: string;
  centers: { digest: string; num_centers: number } | null;
  collections: string[];
  creates_collections: boolean;
  texts?: { context_length: number } | null;
  limits: Record<string, number>;
}

export interface Collection {
  name: string;
  items: number;
  usable: boolean;
  writable: boolean;
  fields: string[];
}

export type Metadata = Record<string, unknown>;

export interface Item {
  id: string;
  thumbnail: string | null;
  metadata?: Metadata | null;
  similarity?: number | null;
}

export interface Recent {
  images: number;
  novelty: number | null;
}

export interface Center {
  id: number;
  name: string | null;
  cluster: number;
  path: string | null;
  alternates: string[];
  recent: Recent | null;
  size: number;
  members: number | null;
  spread: number | null;
  novelty: number | null;
  examples: Item[];
}

export interface CenterPage {
  centers: Center[];
  recent: Recent | null;
  next: string | null;
  total: number;
}

export interface Label {
  id: number;
  similarity: number;
  name: string | null;
  cluster: number;
  path: string | null;
}

export interface Evidence {
  name: string | null;
  score: number;
  margin: number;
  by_chance: number;
  members: number;
  terms: { term: string; share: number; elsewhere: number }[];
  unlike: { center: number; term: string; share: number; there: number } | null;
  typical: { key: string; caption: string }[] | null;
}

export interface DescribedCenter extends Center {
  nearest: Label[];
  evidence: Evidence | null;
}

export interface MemberPage {
  total: number;
  members: Item[];
  next: string | null;
}

export interface Values {
  field: string;
  counts: { value: unknown; items: number }[];
  others: number;
  missing: number;
}

export interface Found {
  exact: boolean;
  matching: number;
  results: { index: number; matches: Item[] }[];
  errors: { index: number; detail: string }[];
}

export interface Labeled {
  results: { index: number; labels: Label[] }[];
  errors: { detail: string }[];
}

export interface Embedded {
  results: { index: number; embedding: number[] }[];
  errors: { detail: string }[];
}

export interface Legend {
  by: string;
  values: { index: number; value: unknown; name: string | null; items: number }[];
}

export interface Selection {
  total: number;
  items: (Item & { position: number })[];
}

export interface DuplicateGroup {
  ids: string[];
  similarities: number[];
  metadata: (Metadata | null)[];
  thumbnails: (string | null)[];
}

export interface Duplicates {
  groups: DuplicateGroup[];
  /** Where there is no group: the pair that comes nearest to one. */
  nearest: DuplicateGroup | null;
}

export interface Outcomes {
  results: { id: string; outcome: string }[];
  errors: { index: number; detail: string }[];
}

export type JobState = "queued" | "running" | "succeeded" | "failed" | "canceled" | string;

export interface Job {
  id: string;
  kind: string;
  state: JobState;
  input: string;
  output: string | null;
  results: Record<string, string> | null;
  created: string;
  started: string | null;
  ended: string | null;
  progress: {
    shards: number | null;
    shards_done: number;
    shards_failed: number;
    images: number | null;
    done: number;
    failed_items: number;
    stage: string | null;
    images_per_s: number | null;
    eta_s: number | null;
  };
  problem: { code: string; message: string; remedy: string | null } | null;
}

export interface JobPage {
  jobs: Job[];
  cursor: string | null;
}

export interface Failures {
  failures: { shard: number; images: number; problem: { code: string; message: string } }[];
  cursor: number | null;
}

export interface Exploration {
  place: string;
  collection: string;
  stage: "list" | "embed" | "cluster" | "name" | "label" | "done" | "failed";
  done: number;
  total: number | null;
  seconds_left: number | null;
  pictures: number;
  skipped: number;
  clusters: number | null;
  considered: number[];
  newest: Item[];
  error: string | null;
  commands: string[];
}

export interface SkippedFiles {
  total: number;
  files: { key: string; reason: string; detail: string }[];
}

export interface DayUsage {
  date: string;
  key: string | null;
  requests: number;
  images: number;
  texts: number;
  tokens: number;
  bytes: number;
}

export interface UsageList {
  store: "memory" | "sqlite" | "redis";
  data: DayUsage[];
}

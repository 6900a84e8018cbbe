// The form that submits a job.

import { useState } from "preact/hooks";
import type { TargetedSubmitEvent } from "preact";

import { askJson } from "../api";
import { Field } from "../parts";
import { go, href } from "../route";
import { useStore } from "../store";
import { archive, upload } from "../uploads";
import type { Job } from "../wire";

type Kind = "label" | "embed" | "index" | "curate";

const KINDS: Record<Kind, { gives: string; output: string }> = {
  label: { gives: "clusters of every image", output: "labels" },
  embed: { gives: "vectors of every image", output: "embeddings" },
  index: { gives: "a collection of every image", output: "collection" },
  curate: { gives: "which of them to keep", output: "selection" },
};
const ISSUES = ["odd-size", "odd-aspect", "dark", "light", "low-information", "blurry"];

const OF_UPLOADS: Kind[] = ["label", "embed", "index"];
const FORMATS: Partial<Record<Kind, string[]>> = {
  label: ["parquet", "csv", "jsonl", "coco", "zip"],
  embed: ["parquet", "jsonl"],
};

export function Submit() {
  const [kind, setKind] = useState<Kind>("label");
  const file = useStore(archive);
  const [wrong, setWrong] = useState("");
  const [told, setTold] = useState("");
  const uploaded = OF_UPLOADS.includes(kind) ? file : null;
  const submit = async (event: TargetedSubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    setWrong("");
    try {
      const json: Record<string, unknown> = request(kind, form);
      if (uploaded) {
        const tell = (share: number) => setTold(`Uploading, ${Math.round(100 * share)} %`);
        tell(0);
        json.input = { file: await upload(uploaded, tell) };
        if (kind !== "index") json.results = form.getAll("results");
      }
      const job = await askJson<Job>("v1/jobs", { json });
      archive.set(null);
      go(href(["jobs", job.id]));
    } catch (error) {
      setTold("");
      setWrong((error as Error).message);
    }
  };
  return (
    <section aria-labelledby="submit" class="submit">
      <h2 id="submit">Submit a job</h2>
      <form onSubmit={submit}>
        <Field label="Kind">
          {(id) => (
            <select id={id} value={kind} onChange={(event) => setKind(event.currentTarget.value as Kind)}>
              {Object.entries(KINDS).map(([known, { gives }]) => (
                <option key={known} value={known}>
                  {known}: {gives}
                </option>
              ))}
            </select>
          )}
        </Field>
        {OF_UPLOADS.includes(kind) && (
          <Field label="Images of this computer: a zip, tar or parquet file, or one picture">
            {(id) => (
              <input
                id={id}
                type="file"
                accept=".zip,.tar,.parquet,image/*"
                onChange={(event) => archive.set(event.currentTarget.files?.[0] ?? null)}
              />
            )}
          </Field>
        )}
        {uploaded && (
          <p class="chip">
            <bdi>{uploaded.name}</bdi>
            <button type="button" aria-label={`Leave out ${uploaded.name}`} onClick={() => archive.set(null)}>
              ×
            </button>
          </p>
        )}
        {uploaded ? <UploadOutput formats={FORMATS[kind]} /> : <Places kind={kind} />}
        {kind === "label" && <OfLabels />}
        {kind === "curate" && <OfCuration />}
        <button disabled={told !== ""}>Submit</button>
        <p role="status" class="soft">
          {told}
        </p>
        <p role="alert" class="wrong">
          {wrong}
        </p>
      </form>
    </section>
  );
}

const Places = ({ kind }: { kind: Kind }) => (
  <>
    <Field label={OF_UPLOADS.includes(kind) ? "Or the input, as workers see it" : "Input, as workers see it"}>
      {(id) => (
        <input
          id={id}
          name="input"
          required
          placeholder={kind === "curate" ? "/data/embeddings" : "/data/photos or /data/*.tar"}
          size={32}
        />
      )}
    </Field>
    <Field label="Output, which must not exist yet">
      {(id) => <input id={id} name="output" required placeholder={`/data/${KINDS[kind].output}`} size={32} />}
    </Field>
  </>
);

/** What a job on an upload makes: files of some formats, or a collection. */
const UploadOutput = ({ formats }: { formats?: string[] }) =>
  formats ? (
    <fieldset>
      <legend>Results</legend>
      {formats.map((format, index) => (
        <label class="choice" key={format}>
          <input type="checkbox" name="results" value={format} defaultChecked={index === 0} /> {format}
        </label>
      ))}
    </fieldset>
  ) : (
    <Field label="Name of the new collection">
      {(id) => <input id={id} name="output" required placeholder="pictures" size={32} />}
    </Field>
  );

/** The body of the request: the fields of the form that are filled in. */
function request(kind: Kind, given: FormData) {
  const text = (name: string) => String(given.get(name) ?? "").trim();
  const number = (name: string) => (text(name) ? Number(text(name)) : undefined);
  const checked = (name: string) => given.has(name) || undefined;
  const options: Record<Kind, object> = {
    label: { top: number("top"), threshold: number("threshold"), embeddings: checked("embeddings") },
    embed: {},
    index: {},
    curate: {
      issues: given.has("issues") ? ISSUES : undefined,
      duplicates: number("duplicates"),
      keep: number("duplicates") === undefined ? undefined : text("keep"),
      outliers: number("outliers"),
      balance: number("balance"),
      report: checked("report"),
    },
  };
  return { kind, input: text("input"), output: text("output") || undefined, ...options[kind] };
}

type Bounds = { min: number; max?: number; step?: "any"; placeholder?: string };

const Amount = ({ label, name, ...bounds }: { label: string; name: string } & Bounds) => (
  <Field label={label}>
    {(id) => <input id={id} name={name} type="number" class="short" {...bounds} />}
  </Field>
);

const Choice = ({ label, name }: { label: string; name: string }) => (
  <label class="choice">
    <input type="checkbox" name={name} /> {label}
  </label>
);

const OfLabels = () => (
  <>
    <Amount label="Labels of each image" name="top" min={1} placeholder="8" />
    <Amount label="Least similarity" name="threshold" min={-1} max={1} step="any" />
    <Choice label="write embeddings, too" name="embeddings" />
  </>
);

const OfCuration = () => (
  <>
    <Amount label="Near duplicates from a cosine of" name="duplicates" min={0} max={1} step="any" placeholder="0.96" />
    <Field label="Of near duplicates keep">
      {(id) => (
        <select id={id} name="keep">
          <option value="first">the first</option>
          <option value="best">the most typical</option>
          <option value="largest">the largest file</option>
        </select>
      )}
    </Field>
    <Amount label="Outliers, a share" name="outliers" min={0} max={1} step="any" placeholder="0.01" />
    <Amount label="Images left, evenly over clusters" name="balance" min={1} />
    <Choice label="leave out dark, blurry and odd images" name="issues" />
    <Choice label="write a report with pictures" name="report" />
  </>
);

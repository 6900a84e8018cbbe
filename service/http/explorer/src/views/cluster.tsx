// One cluster: its members by distance, the clusters nearest to it, what its members have in common.

import { useEffect, useRef, useState } from "preact/hooks";

import { askJson, query, Refused } from "../api";
import type { View } from "../app";
import { connection } from "../connection";
import { useLoaded, usePages } from "../loaded";
import { Bar, Empty, EmptyServer, Failure, Field, Fold, Heading, More, Once, Tiles } from "../parts";
import { changed, go, href, useRoute } from "../route";
import type { Session } from "../session";
import { store, useStore } from "../store";
import { belongs, clusterName, count, counted, percent, shown, similarity } from "../text";
import { Mosaic } from "../thumbnails";
import type { DescribedCenter, Evidence, Label, MemberPage, Values } from "../wire";

const MOST_OF_A_NAME = 200;
const NO_SCOPE = "This key may only read. Enter one with the scope write.";
/** The name that a cluster had before it was changed here. */
const before = store<{ path: string; name: string | null } | null>(null);

export function Cluster({ id, session }: View & { id: string }) {
  const collection = session.collection?.name;
  const path = `v1/centers/${encodeURIComponent(id)}`;
  const center = useLoaded(
    (signal) => askJson<DescribedCenter>(`${path}${query({ collection })}`, { signal }),
    [path, collection],
  );
  return (
    <>
      <p class="trail">
        <a href={href(["clusters"], { collection: session.collection?.name })}>Clusters</a>
      </p>
      <div class="bar-of-tools">
        <Heading>
          <bdi class={center.value?.name === null ? "unnamed" : ""}>
            {center.value ? clusterName(center.value) : `Cluster ${id}`}
          </bdi>
        </Heading>
        {center.value && (
          <Rename path={path} name={center.value.name} terms={center.value.evidence?.terms ?? []} key={center.value.name} />
        )}
        {center.value && <Facts center={center.value} />}
        {center.value && collection && (
          <div class="tools">
            <a class="button" href={href(["map"], { collection, by: "cluster", only: id })}>
              Show on the map
            </a>
          </div>
        )}
      </div>
      {center.error && <Failure error={center.error} again={center.again} />}
      <div class="with-side">
        <Fold title="About this cluster" class="side">
          {center.value?.evidence && <Grounds name={center.value.name} evidence={center.value.evidence} collection={collection} />}
          {session.collection && !center.error && <Spread path={path} session={session} />}
          {center.value && center.value.nearest.length > 0 && (
            <section aria-labelledby="nearest">
              <h2 id="nearest">Nearest clusters</h2>
              <LabelStrip labels={center.value.nearest} collection={collection} />
            </section>
          )}
        </Fold>
        {session.collection ? (
          !center.error && <Members path={path} collection={session.collection.name} />
        ) : (
          <EmptyServer title="No collection to look into" session={session} />
        )}
      </div>
    </>
  );
}

/** A pencil beside the name: Enter saves, Escape does not, and the name before can be taken back. Terms are proposed. */
function Rename({ path, name, terms }: { path: string; name: string | null; terms: Evidence["terms"] }) {
  const [editing, setEditing] = useState(false);
  const [wrong, setWrong] = useState("");
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.select(), [editing]);
  const give = async (given: string | null) => {
    try {
      await askJson(path, { method: "PATCH", json: { name: given } });
      before.set({ path, name });
      connection.refresh();
    } catch (error) {
      setWrong(error instanceof Refused && error.status === 403 ? NO_SCOPE : (error as Error).message);
    }
  };
  const undo = useStore(before);
  if (!editing)
    return (
      <span class="rename">
        <button type="button" class="quiet" aria-label="Rename" title="Rename" onClick={() => setEditing(true)}>
          {name === null ? "✎ Name it" : "✎"}
        </button>
        {undo?.path === path && undo.name !== name && (
          <button type="button" class="quiet" onClick={() => void give(undo.name)}>
            Undo
          </button>
        )}
        <span role="alert" class="wrong">{wrong}</span>
      </span>
    );
  return (
    <form
      class="rename"
      onSubmit={(event) => {
        event.preventDefault();
        void give(field.current!.value.trim() || null);
        setEditing(false);
      }}
    >
      <input
        ref={field}
        aria-label="Name"
        list="terms"
        maxLength={MOST_OF_A_NAME}
        defaultValue={name ?? ""}
        onKeyDown={(event) => event.key === "Escape" && setEditing(false)}
      />
      <datalist id="terms">
        {terms.map(({ term }) => (
          <option key={term} value={term} />
        ))}
      </datalist>
      <button>Save</button>
    </form>
  );
}

function Facts({ center }: { center: DescribedCenter }) {
  return (
    <dl class="facts">
      <div>
        <dt>Number</dt>
        <dd>{center.id}</dd>
      </div>
      {belongs(center) && (
        <div title="The cluster that it was merged into, and its place on the coarser levels">
          <dt>Place</dt>
          <dd>{belongs(center)}</dd>
        </div>
      )}
      <div>
        <dt>In training</dt>
        <dd>{count(center.size)}</dd>
      </div>
      {typeof center.members === "number" && (
        <div>
          <dt>In the collection</dt>
          <dd>{count(center.members)}</dd>
        </div>
      )}
      {typeof center.spread === "number" && (
        <div title="Mean distance (1 − cosine) of the members to the center">
          <dt>Spread</dt>
          <dd>{center.spread.toFixed(3)}</dd>
        </div>
      )}
      {typeof center.novelty === "number" && (
        <div title="Share of members farther from the center than its training members were">
          <dt>Novel</dt>
          <dd>{percent(center.novelty)}</dd>
        </div>
      )}
      {center.recent && center.recent.novelty !== null && (
        <div title="Share of the images labeled of late that are farther from the center than 95 % of its members">
          <dt>Of late novel</dt>
          <dd>
            {percent(center.recent.novelty)} of {count(center.recent.images)}
          </dd>
        </div>
      )}
    </dl>
  );
}

/** Why the cluster has its name, or has none. */
function Grounds({ name, evidence, collection }: { name: string | null; evidence: Evidence; collection: string | undefined }) {
  const { terms, unlike, typical } = evidence;
  const title = name !== evidence.name ? "Words that its members resemble" : name === null ? "Why it has no name" : "Why this name";
  return (
    <section aria-labelledby="grounds" class="values">
      <h2 id="grounds">{title}</h2>
      <table>
        <caption class="small soft">
          Share of {counted(evidence.members, "member")} that have a term, and of the other clusters' members
        </caption>
        <thead class="unseen">
          <tr>
            <th scope="col">Term</th>
            <th scope="col">Members</th>
            <th scope="col">Elsewhere</th>
          </tr>
        </thead>
        <tbody>
          {terms.map(({ term, share, elsewhere }) => (
            <tr key={term}>
              <th scope="row">
                <bdi>{term}</bdi>
              </th>
              <td>
                <Bar share={share} />
                {percent(share)}
              </td>
              <td>{percent(elsewhere)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="small soft">
        score {evidence.score.toFixed(2)}, {evidence.margin.toFixed(2)} ahead of the next; {evidence.by_chance.toFixed(2)} by chance
      </p>
      {unlike && (
        <p class="small">
          unlike <a href={href(["clusters", unlike.center], { collection })}>cluster {unlike.center}</a>: <bdi>{unlike.term}</bdi> (
          {percent(unlike.share)} here, {percent(unlike.there)} there)
        </p>
      )}
      {typical?.map(({ key, caption }) => (
        <blockquote key={key} class="small">
          <bdi>{caption}</bdi>
        </blockquote>
      ))}
    </section>
  );
}

/** Clusters in a row, with their mosaics. */
export function LabelStrip({ labels, collection }: { labels: Label[]; collection: string | undefined }) {
  return (
    <ul class="strip">
      {labels.map((label) => (
        <li key={label.id} class="card">
          <a href={href(["clusters", label.id], { collection })}>
            {collection && <MosaicOf id={label.id} collection={collection} />}
            <h3>
              <bdi>{clusterName(label)}</bdi>
            </h3>
            <p class="facts">
              <span>
                <span class="unseen">similarity </span>
                {similarity(label.similarity)}
              </span>
              {belongs(label) && <span>{belongs(label)}</span>}
            </p>
          </a>
        </li>
      ))}
    </ul>
  );
}

function MosaicOf({ id, collection }: { id: number; collection: string }) {
  const { value } = useLoaded(
    (signal) => askJson<MemberPage>(`v1/centers/${id}/members${query({ collection, limit: 6 })}`, { signal }),
    [id, collection],
  );
  return <Mosaic collection={collection} items={value?.members ?? []} />;
}

function Spread({ path, session }: { path: string; session: Session }) {
  const { name, fields } = session.collection!;
  const chosen = useRoute().params.get("field");
  const field = chosen && fields.includes(chosen) ? chosen : fields[0];
  const values = useLoaded(
    field === undefined
      ? null
      : (signal) => askJson<Values>(`${path}/values${query({ collection: name, field, limit: 8 })}`, { signal }),
    [path, name, field],
    { keep: true },
  );
  if (field === undefined) return null;
  return (
    <section aria-labelledby="values" class="values">
      <div class="bar-of-tools">
        <h2 id="values">What the members are</h2>
        <Field label="Field">
          {(id) => (
            <select id={id} value={field} onChange={(event) => go(changed({ field: event.currentTarget.value }), { replace: true })}>
              {fields.map((known) => (
                <option key={known}>{known}</option>
              ))}
            </select>
          )}
        </Field>
      </div>
      <Once loaded={values}>
        {({ counts, others, missing }) => {
          const most = Math.max(1, ...counts.map(({ items }) => items));
          return (
            <table>
              <caption class="unseen">Members by {field}</caption>
              <thead class="unseen">
                <tr>
                  <th scope="col">Value</th>
                  <th scope="col">Members</th>
                </tr>
              </thead>
              <tbody>
                {counts.map(({ value, items }) => (
                  <tr key={shown(value)}>
                    <th scope="row">
                      <bdi>{shown(value)}</bdi>
                    </th>
                    <td>
                      <Bar share={items / most} />
                      {count(items)}
                    </td>
                  </tr>
                ))}
                {others > 0 && (
                  <tr>
                    <th scope="row">other values</th>
                    <td>{count(others)}</td>
                  </tr>
                )}
                {missing > 0 && (
                  <tr>
                    <th scope="row">none</th>
                    <td>{count(missing)}</td>
                  </tr>
                )}
              </tbody>
            </table>
          );
        }}
      </Once>
    </section>
  );
}

function Members({ path, collection }: { path: string; collection: string }) {
  const paged = usePages(
    async (cursor, signal) => {
      const asked = query({ collection, limit: 60, cursor });
      const page = await askJson<MemberPage>(`${path}/members${asked}`, { signal });
      return { rows: page.members, next: page.next, total: page.total };
    },
    [path, collection],
  );
  return (
    <section aria-labelledby="members">
      <div class="bar-of-tools">
        <h2 id="members">Members, nearest first</h2>
        <p class="soft" role="status">
          {paged.total !== null && counted(paged.total, "picture")}
        </p>
      </div>
      {paged.error && !paged.rows.length ? (
        <Failure error={paged.error} again={paged.again} />
      ) : (
        <>
          {paged.total === 0 && <Empty title="No item of this collection is nearest to this cluster" />}
          <Tiles collection={collection} items={paged.rows} label="Members" />
          <More paged={paged} />
        </>
      )}
    </section>
  );
}

// What the key has used on each of the last 30 days; a key of scope admin sees all keys.

import { askJson } from "../api";
import { useLoaded } from "../loaded";
import { Bar, Empty, Field, Heading, Once } from "../parts";
import { changed, go, useRoute } from "../route";
import { count } from "../text";
import type { DayUsage, UsageList } from "../wire";

const KINDS = ["requests", "images", "texts", "tokens", "bytes"] as const;
const NO_KEY = "none";

export function Usage() {
  const chosen = useRoute().params.get("key");
  const loaded = useLoaded((signal) => askJson<UsageList>("v1/usage", { signal }), []);
  const keys = [...new Set(loaded.value?.data.map(keyOf))].sort();
  return (
    <>
      <div class="bar-of-tools">
        <Heading>Usage</Heading>
        {keys.length > 1 && (
          <div class="tools">
            <Field label="Key">
              {(id) => (
                <select id={id} value={chosen ?? ""} onChange={(event) => go(changed({ key: event.currentTarget.value }))}>
                  <option value="">all</option>
                  {keys.map((key) => (
                    <option key={key}>{key}</option>
                  ))}
                </select>
              )}
            </Field>
          </div>
        )}
      </div>
      <Once loaded={loaded}>
        {({ data, store }) => (
          <>
            {store === "memory" && (
              <p class="soft">
                Counted since the start of this server process. Start the server with <code>MLCD_STATE_DIR</code> or{" "}
                <code>MLCD_REDIS_URL</code> to keep it.
              </p>
            )}
            <Days days={byDay(data.filter((row) => !chosen || keyOf(row) === chosen))} />
          </>
        )}
      </Once>
    </>
  );
}

function Days({ days }: { days: DayUsage[] }) {
  if (!days.length) return <Empty title="No request with images or texts in the last 30 days" />;
  const most = Math.max(...days.map(({ requests }) => requests));
  return (
    <div class="scrolled" role="region" aria-label="Usage by day" tabIndex={0}>
      <table class="usage">
        <thead>
          <tr>
            {["day (UTC)", ...KINDS].map((title) => (
              <th key={title} scope="col">
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {days.map((day) => (
            <tr key={day.date}>
              <th scope="row">{day.date}</th>
              {KINDS.map((kind) => (
                <td key={kind}>
                  {kind === "requests" && <Bar share={day.requests / most} />}
                  {count(day[kind])}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const keyOf = ({ key }: DayUsage) => key ?? NO_KEY;

/** The sums of all rows of a day, the latest day first. */
function byDay(rows: DayUsage[]): DayUsage[] {
  const days = new Map<string, DayUsage>();
  for (const row of rows) {
    const day = days.get(row.date);
    if (day) for (const kind of KINDS) day[kind] += row[kind];
    else days.set(row.date, { ...row });
  }
  return [...days.values()].reverse();
}

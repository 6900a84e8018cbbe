// Filters over metadata: conditions in the address, and the form that adds one.

import { useId, useState } from "preact/hooks";
import type { TargetedSubmitEvent } from "preact";

import { askJson, collectionPath, query } from "./api";
import { useLoaded } from "./loaded";
import { Field } from "./parts";
import { changed, go } from "./route";
import { shown } from "./text";
import type { Collection, Legend } from "./wire";

const OPERATORS = { is: "is", not: "is not", ge: "≥", le: "≤" };

export interface Condition {
  field: string;
  operator: keyof typeof OPERATORS;
  value: string;
}

export function conditionsIn(params: URLSearchParams): Condition[] {
  return params.getAll("where").flatMap((text) => {
    try {
      const [field, operator, value] = JSON.parse(text);
      return operator in OPERATORS ? [{ field, operator, value: String(value) }] : [];
    } catch {
      return [];
    }
  });
}

const written = (all: Condition[]) =>
  all.map(({ field, operator, value }) => JSON.stringify([field, operator, value]));

/** The filter of a search; null where there is no condition. */
export function filterOf(conditions: Condition[], ids: string[] | null): unknown {
  const all = conditions.map(compared);
  if (ids) all.push({ id: { in: ids } });
  return all.length > 1 ? { and: all } : (all[0] ?? null);
}

/** What is typed may be kept as a text, a number or a boolean: each is asked for. */
function compared({ field, operator, value }: Condition): unknown {
  if (operator === "ge" || operator === "le") return { field, [operator]: Number(value) };
  const kinds: unknown[] = [value];
  if (value.trim() !== "" && Math.abs(Number(value)) <= Number.MAX_SAFE_INTEGER) kinds.push(Number(value));
  if (value === "true" || value === "false") kinds.push(value === "true");
  const each = kinds.map((kind) => ({ field, eq: kind }));
  const any = each.length > 1 ? { or: each } : each[0];
  return operator === "not" ? { not: any } : any;
}

export function Filters({ collection, conditions }: { collection: Collection; conditions: Condition[] }) {
  if (!collection.fields.length) return null;
  const keep = (all: Condition[]) => go(changed({ where: written(all) }));
  return (
    <div class="filters">
      {conditions.map((condition, at) => (
        <span class="chip" key={JSON.stringify(condition)}>
          <bdi>
            {condition.field} {OPERATORS[condition.operator]} {condition.value}
          </bdi>
          <button
            type="button"
            aria-label={`Remove the filter ${condition.field} ${OPERATORS[condition.operator]} ${condition.value}`}
            onClick={() => keep(conditions.toSpliced(at, 1))}
          >
            ×
          </button>
        </span>
      ))}
      <Entry collection={collection} onAdd={(condition) => keep([...conditions, condition])} />
    </div>
  );
}

function Entry({ collection, onAdd }: { collection: Collection; onAdd(condition: Condition): void }) {
  const [field, setField] = useState(collection.fields[0]!);
  const [asked, setAsked] = useState(false);
  const known = useId();
  const path = `${collectionPath(collection.name)}/layout/legend`;
  const legend = useLoaded(
    asked ? (signal) => askJson<Legend>(`${path}${query({ by: `metadata.${field}` })}`, { signal }) : null,
    [path, field],
  );
  const add = (event: TargetedSubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = event.currentTarget;
    const given = new FormData(form);
    const value = String(given.get("value"));
    const operator = given.get("operator") as Condition["operator"];
    onAdd({ field, operator, value });
    form.reset();
  };
  return (
    <form onSubmit={add} onFocusIn={() => setAsked(true)}>
      <Field label="Only where">
        {(id) => (
          <select id={id} value={field} onChange={(event) => setField(event.currentTarget.value)}>
            {collection.fields.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        )}
      </Field>
      <select name="operator" aria-label="How it compares">
        {Object.entries(OPERATORS).map(([value, title]) => (
          <option key={value} value={value}>
            {title}
          </option>
        ))}
      </select>
      <input name="value" aria-label="Value" required size={12} list={known} autocomplete="off" />
      <datalist id={known}>
        {legend.value?.values.slice(0, 100).map(({ value }) => <option key={shown(value)} value={shown(value)} />)}
      </datalist>
      <button>Add</button>
    </form>
  );
}

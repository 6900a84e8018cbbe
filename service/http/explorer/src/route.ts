// The state of the page is its address: a path and parameters behind the #, which never reaches a
// server and works behind any prefix.

import { store, useStore } from "./store";

export interface Route {
  path: string[];
  params: URLSearchParams;
}

type Value = string | number | null | undefined | false;
export type Params = Record<string, Value | string[]>;

function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path: path.split("/").filter(Boolean).map(decoded), params: new URLSearchParams(query) };
}

/** A component of an address that a person has edited may not be an encoding of anything. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const current = store(parse(location.hash));
const follow = () => current.set(parse(location.hash));
addEventListener("hashchange", follow);
addEventListener("popstate", follow);

/** How many entries of the history lie between the view and what is open above it. */
const depth = () => Number(history.state?.depth ?? 0);

export const useRoute = () => useStore(current);
export const route = () => current.get();

export function href(path: (string | number)[], params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (Array.isArray(value)) for (const one of value) query.append(name, one);
    else if (value !== null && value !== undefined && value !== false && value !== "")
      query.set(name, String(value));
  }
  const text = query.toString();
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${text && `?${text}`}`;
}

/** The address with some parameters changed; null removes one. */
export function changed(changes: Params): string {
  const { path, params } = current.get();
  const kept: Params = {};
  for (const name of new Set(params.keys())) {
    const values = params.getAll(name);
    kept[name] = values.length > 1 ? values : values[0];
  }
  return href(path, { ...kept, ...changes });
}

/** replace: without an entry for the back button, for what changes as one types or drags. */
export function go(to: string, { replace = false } = {}): void {
  if (to === location.hash) return;
  if (replace) history.replaceState(history.state, "", to);
  else history.pushState(null, "", to);
  follow();
}

/** Opens something above the view, which stays as it is. */
export function goAbove(to: string): void {
  if (to === location.hash) return;
  history.pushState({ depth: depth() + 1 }, "", to);
  follow();
}

/** Goes back to the view itself, whose address is `to`. */
export function goBelow(to: string): void {
  const arrive = () => go(to, { replace: true }); // the first of what was open may have been a link from elsewhere
  if (!depth()) return arrive();
  addEventListener("popstate", arrive, { once: true });
  history.go(-depth());
}

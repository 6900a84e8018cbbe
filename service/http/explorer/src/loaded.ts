// What a component loads: the value, an error, or neither yet.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { connection } from "./connection";
import { useStore } from "./store";

export interface Loaded<T> {
  value: T | null;
  error: Error | null;
  loading: boolean;
  again(): void;
}

/**
 * Loads when `asked` changes, and again when the server has come back; null loads nothing.
 * keep: the value of the question before is shown until there is one of this question.
 */
export function useLoaded<T>(
  load: ((signal: AbortSignal) => Promise<T>) | null,
  asked: readonly unknown[],
  { keep = false } = {},
): Loaded<T> {
  const key = JSON.stringify([...asked, load === null]);
  const [state, setState] = useState<State<T>>({ ...NOTHING, key, loading: load !== null });
  const [tries, setTries] = useState(0);
  const epoch = useStore(connection.epoch);
  useEffect(() => {
    if (!load) {
      setState({ ...NOTHING, key });
      return;
    }
    const gone = new AbortController();
    setState((before) => {
      const value = keep || before.key === key ? before.value : null;
      return { key, value, error: null, loading: true };
    });
    const settle = (settled: Partial<State<T>>) =>
      gone.signal.aborted || setState((before) => ({ ...before, loading: false, ...settled }));
    load(gone.signal).then(
      (value) => settle({ value, error: null }),
      (error) => settle({ error }),
    );
    return () => gone.abort();
  }, [key, tries, epoch]);
  const again = useCallback(() => setTries((tried) => tried + 1), []);
  // The state of another question is none of this one's.
  if (state.key !== key && !keep) return { ...NOTHING, loading: load !== null, again };
  return { ...state, loading: state.loading || state.key !== key, again };
}

interface State<T> {
  key: string;
  value: T | null;
  error: Error | null;
  loading: boolean;
}

const NOTHING = { value: null, error: null, loading: false };

export interface Page<T> {
  rows: T[];
  next: string | null;
  total: number;
}

export interface Paged<T, P = Page<T>> {
  rows: T[];
  total: number | null;
  /** The first page, with all that it says beside its rows. */
  first: P | null;
  error: Error | null;
  loading: boolean;
  more: (() => void) | null;
  again(): void;
}

/** Loads page after page of one list. */
export function usePages<P extends Page<unknown>>(
  load: ((cursor: string | null, signal: AbortSignal) => Promise<P>) | null,
  asked: readonly unknown[],
): Paged<P["rows"][number], P> {
  const first = useLoaded(load && ((signal) => load(null, signal)), asked, { keep: true });
  const [later, setLater] = useState<{ of: P; pages: P[] } | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const [loading, setLoading] = useState(false);
  const pages = first.value ? [first.value, ...(later?.of === first.value ? later.pages : [])] : [];
  const next = pages.at(-1)?.next ?? null;
  const busy = useRef(false);
  const more = useCallback(() => {
    const of = first.value;
    if (busy.current || next === null || !of || !load) return;
    busy.current = true;
    setLoading(true);
    setError(null);
    load(next, new AbortController().signal)
      .then((page) => setLater({ of, pages: [...pages.slice(1), page] }), setError)
      .finally(() => {
        busy.current = false;
        setLoading(false);
      });
  }, [first.value, next]);
  return {
    rows: pages.flatMap((page) => page.rows),
    total: first.value?.total ?? null,
    first: first.value,
    error: first.error ?? error,
    loading: first.loading || loading,
    more: next === null ? null : more,
    again: first.error ? first.again : more,
  };
}

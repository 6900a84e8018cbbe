// A value that components watch.

import { useEffect, useState } from "preact/hooks";

export interface Store<T> {
  get(): T;
  set(value: T): void;
  watch(listener: () => void): () => void;
}

export function store<T>(initial: T): Store<T> {
  let value = initial;
  const listeners = new Set<() => void>();
  return {
    get: () => value,
    set(changed) {
      if (Object.is(changed, value)) return;
      value = changed;
      for (const listener of [...listeners]) listener();
    },
    watch(listener) {
      listeners.add(listener);
      return () => void listeners.delete(listener);
    },
  };
}

export function useStore<T>(watched: Store<T>): T {
  const [value, setValue] = useState(watched.get());
  useEffect(() => {
    const update = () => setValue(() => watched.get());
    update();
    return watched.watch(update);
  }, [watched]);
  return value;
}

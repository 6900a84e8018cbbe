// The server may go and come back. While it is gone the page asks for it at growing intervals and
// says so; when it is back everything that could not be loaded is asked for again.

import { store } from "./store";

const FIRST_MS = 1000;
const LONGEST_MS = 10_000;

export interface Gone {
  tries: number;
  next: number; // by Date.now
}

const gone = store<Gone | null>(null);
/** A number that changes whenever the server has come back, or a key was entered. */
const epoch = store(0);
let timer = 0;

async function look(): Promise<void> {
  const tries = gone.get()?.tries ?? 0;
  try {
    const answer = await fetch(new URL("health/live", document.baseURI), { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    gone.set(null);
    refresh();
  } catch {
    schedule(tries + 1);
  }
}

function schedule(tries: number): void {
  const wait = Math.min(LONGEST_MS, FIRST_MS * 2 ** tries);
  gone.set({ tries, next: Date.now() + wait });
  clearTimeout(timer);
  timer = window.setTimeout(look, wait);
}

function refresh(): void {
  epoch.set(epoch.get() + 1);
}

export const connection = {
  gone,
  epoch,
  refresh,
  lost(): void {
    if (!gone.get()) schedule(0);
  },
  tryNow(): void {
    clearTimeout(timer);
    void look();
  },
};

// Colors of the map: ten that are told apart by most eyes, then hues a golden angle apart.

const LIGHT = ["#3b6fb6", "#d9822b", "#2f8f5b", "#b8465a", "#7d5bb0", "#8c6a3f", "#c25aa0", "#4d9fae", "#8f9a2f", "#e0604c"];
const DARK = ["#7aa8f0", "#f0a85a", "#63c48d", "#ee8195", "#b397ea", "#c9a272", "#ec90cd", "#7fd0de", "#c6d162", "#ff9482"];
const GOLDEN_ANGLE = 137.508;

export interface Shades {
  named: string[];
  lightness: number;
  unknown: string;
  faint: string;
}

export const shades = (dark: boolean): Shades =>
  dark
    ? { named: DARK, lightness: 68, unknown: "#6b7079", faint: "#2b2e35" }
    : { named: LIGHT, lightness: 46, unknown: "#9a9fa8", faint: "#dddeda" };

/** The color of a place in the legend. */
export const colorAt = (place: number, { named, lightness }: Shades): string =>
  named[place] ?? `hsl(${((place * GOLDEN_ANGLE) % 360).toFixed(0)} 48% ${lightness + (place % 3) * 6 - 6}%)`;

const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true })!;

/** Any color of CSS as red, green and blue. */
export function bytesOf(color: string): [number, number, number] {
  paper.fillStyle = color;
  paper.fillRect(0, 0, 1, 1);
  const [red = 0, green = 0, blue = 0] = paper.getImageData(0, 0, 1, 1).data;
  return [red, green, blue];
}

// Points in WebGL2. While the sight moves only so many are drawn as a frame has time for: rows are
// in a shuffled order, and any first part is a fair sample. All are drawn once it is still, in slices.

import { pointSize, type Sight, type Size } from "./plane";

const VERTEX = `#version 300 es
layout(location = 0) in vec2 place;
layout(location = 1) in uint slot;
uniform vec4 sight;  // its center, then what a unit is in clip space
uniform float size;
uniform sampler2D palette;
flat out vec3 color;
void main() {
  vec4 given = texelFetch(palette, ivec2(int(slot), 0), 0);
  // Faint points lie behind the others.
  gl_Position = vec4((place - sight.xy) * sight.zw, given.a < 0.75 ? 0.5 : 0.0, 1.0);
  gl_PointSize = size;
  color = given.rgb;
}`;
const FRAGMENT = `#version 300 es
precision highp float;
uniform float size;
flat in vec3 color;
out vec4 shade;
void main() {
  if (size > 4.0 && distance(gl_PointCoord, vec2(0.5)) > 0.5) discard;
  shade = vec4(color, 1.0);
}`;

const STILL_MS = 140;
const FRAME_MS = 50; // a frame that takes longer while moving has too many points
const LEAST = 5_000;
export class Points {
  private readonly gl: WebGL2RenderingContext;
  private readonly places: WebGLBuffer;
  private readonly slots: WebGLBuffer;
  private readonly uniforms: Record<"sight" | "size", WebGLUniformLocation>;
  private num = 0;
  private known = 0; // of the points, those that have a slot
  private drawn = 0;
  private budget = 50_000;
  private fresh = false;
  private frame = 0;
  private last = 0;
  private movingUntil = 0;
  private sight: Sight = { x: 0, y: 0, scale: 1 };

  /** Raises Error where the browser has no WebGL2. */
  constructor(private readonly canvas: HTMLCanvasElement) {
    const gl = canvas.getContext("webgl2", { antialias: false, alpha: true, preserveDrawingBuffer: true });
    if (!gl) throw new Error("This browser has no WebGL2, which the map is drawn with.");
    this.gl = gl;
    const program = gl.createProgram();
    for (const source of [VERTEX, FRAGMENT]) {
      const shader = gl.createShader(source === VERTEX ? gl.VERTEX_SHADER : gl.FRAGMENT_SHADER)!;
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    gl.useProgram(program);
    gl.enable(gl.DEPTH_TEST);
    gl.depthFunc(gl.LEQUAL); // a later point lies on top
    [this.places, this.slots] = [gl.createBuffer(), gl.createBuffer()];
    const uniform = (name: string) => gl.getUniformLocation(program, name)!;
    this.uniforms = { sight: uniform("sight"), size: uniform("size") };
    gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MIN_FILTER, gl.NEAREST);
    gl.enableVertexAttribArray(0);
    gl.enableVertexAttribArray(1);
  }

  /** places: [n, 2], in the order in which they are drawn. */
  setPlaces(places: Float32Array): void {
    this.upload(this.places, places);
    this.gl.vertexAttribPointer(0, 2, this.gl.FLOAT, false, 0, 0);
    this.num = places.length / 2;
  }

  /** slots: of each point, its color in the palette. */
  setSlots(slots: Uint16Array): void {
    this.upload(this.slots, slots);
    this.gl.vertexAttribIPointer(1, 1, this.gl.UNSIGNED_SHORT, 0, 0);
    this.known = slots.length;
  }

  /** palette: red, green, blue, and 128 for what lies behind the others, 255 for those. */
  setPalette(palette: Uint8Array): void {
    const { gl } = this;
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, palette.length / 4, 1, 0, gl.RGBA, gl.UNSIGNED_BYTE, palette);
    this.redraw();
  }

  private upload(buffer: WebGLBuffer, values: Float32Array | Uint16Array): void {
    this.gl.bindBuffer(this.gl.ARRAY_BUFFER, buffer);
    this.gl.bufferData(this.gl.ARRAY_BUFFER, values, this.gl.STATIC_DRAW);
    this.redraw();
  }

  moveTo(sight: Sight): void {
    this.sight = sight;
    this.movingUntil = performance.now() + STILL_MS;
    this.redraw();
  }

  close(): void {
    cancelAnimationFrame(this.frame);
    this.gl.getExtension("WEBGL_lose_context")?.loseContext();
  }

  private redraw(): void {
    this.fresh = true;
    if (!this.frame) this.frame = requestAnimationFrame(this.step);
  }

  private readonly step = (now: number): void => {
    const moving = now < this.movingUntil;
    if (this.last && moving) this.adapt(now - this.last);
    this.last = moving ? now : 0;
    if (this.fresh) this.begin();
    if (this.drawn === 0 || !moving) this.slice();
    this.canvas.dataset.drawn = String(this.drawn); // for measurements
    this.frame = moving || this.drawn < Math.min(this.num, this.known) ? requestAnimationFrame(this.step) : 0;
  };

  private adapt(frame: number): void {
    const better = frame > FRAME_MS ? 0.8 : frame < FRAME_MS / 2 ? 1.1 : 1;
    this.budget = Math.round(Math.max(LEAST, Math.min(this.budget * better, 1e6)));
  }

  private begin(): void {
    const { gl, canvas, sight } = this;
    const size: Size = { width: canvas.clientWidth, height: canvas.clientHeight };
    const dense = window.devicePixelRatio;
    const [width, height] = [Math.round(size.width * dense), Math.round(size.height * dense)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    gl.viewport(0, 0, width, height);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    const scales = [(2 * sight.scale) / size.width, (2 * sight.scale) / size.height];
    gl.uniform4fv(this.uniforms.sight, [sight.x, sight.y, ...scales]);
    gl.uniform1f(this.uniforms.size, dense * pointSize(this.num, sight.scale, size));
    [this.drawn, this.fresh] = [0, false];
  }

  private slice(): void {
    const num = Math.min(this.budget, Math.min(this.num, this.known) - this.drawn);
    if (num <= 0) return; // one of the buffers may not be there yet, which WebGL reports as an error
    this.gl.drawArrays(this.gl.POINTS, this.drawn, num);
    this.drawn += num;
  }
}

import { defineConfig } from "vite";

// Addresses are relative to the page, so that it works behind a proxy that adds a prefix. Nothing
// is put inline: the policy allows neither inline code nor data: addresses.
export default defineConfig({
  base: "./",
  build: {
    outDir: "static",
    emptyOutDir: true,
    target: "es2024",
    assetsInlineLimit: 0,
    modulePreload: false,
    chunkSizeWarningLimit: 200,
    license: { fileName: "licenses.md" }, // of the libraries in it, whose notices go where they go
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8000", "/health": "http://127.0.0.1:8000" } },
});

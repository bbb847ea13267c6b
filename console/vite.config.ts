import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The gateway that `npm run dev` talks to.
const gateway = "http://127.0.0.1:3210";

export default defineConfig({
  // Relative addresses: the console also works under a path prefix behind a proxy.
  base: "./",
  plugins: [svelte()],
  build: {
    outDir: "../src/farhand/console/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    reportCompressedSize: false,
  },
  server: { proxy: { "/v1": { target: gateway, ws: true }, "/signin": gateway } },
});

// Syntax highlighting for the languages that files on machines mostly have.

import bash from "highlight.js/lib/languages/bash";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import ini from "highlight.js/lib/languages/ini";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import markdown from "highlight.js/lib/languages/markdown";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";

const lowlight = createLowlight({ bash, css, diff, ini, javascript, json, markdown, python, sql, typescript, xml, yaml });
const NAMES: Record<string, string> = { sh: "bash", zsh: "bash", js: "javascript", mjs: "javascript", ts: "typescript", py: "python", md: "markdown", yml: "yaml", toml: "ini", conf: "ini", cfg: "ini", service: "ini", html: "xml", svg: "xml", svelte: "xml", patch: "diff" };

/** The highlighted text as a tree, or null for an unknown language. */
export function highlight(text: string, ending: string): unknown[] | null {
  const language = NAMES[ending] ?? ending;
  return lowlight.registered(language) ? lowlight.highlight(language, text).children : null;
}

// Files of the workspace and of machines, with the same few operations.

import { ApiError, ask, part, post, query, send } from "./api";
import { save } from "./download";

/** The name of the agents' workspace in the addresses of transfers. */
export const WORKSPACE = "gsv";
export const LONGEST_TEXT = 2 * 1024 * 1024;

export interface Folder {
  folders: string[];
  files: string[];
}

export interface Content {
  bytes: Uint8Array;
  /** The version, to notice a change before saving. */
  version: string;
}

export const join = (folder: string, name: string): string => `${folder.replace(/\/+$/, "")}/${name}`.replace(/^\/+(?=[^/])/, folder.startsWith("/") ? "/" : "");
export const nameOf = (path: string): string => path.replace(/\/+$/, "").split("/").pop() ?? "";
export const parentOf = (path: string): string => path.replace(/\/+$/, "").replace(/\/?[^/]*$/, "") || (path.startsWith("/") ? "/" : "");
export const endpoint = (place: string, path: string): string => `${place}:${path}`;
const inWorkspace = (path: string): string => `v1/workspace/main/${path.split("/").filter(Boolean).map(part).join("/")}`;

async function matches(place: string, path: string, pattern: string): Promise<string[]> {
  const answer = await post<{ ok: boolean; result?: { matches: string[] }; error?: { message: string } }>("v1/tools/invoke", { tool: `${place}__Glob`, args: { pattern, path: path || null } });
  if (!answer.ok) throw new ApiError(answer.error?.message ?? "", 400);
  return answer.result?.matches ?? [];
}

export async function list(place: string, path: string): Promise<Folder> {
  if (place === WORKSPACE) {
    const answer = await ask<{ files: string[]; directories: string[] }>(inWorkspace(path).replace(/\/$/, ""));
    return { folders: answer.directories.map((name) => nameOf(name)).sort(), files: answer.files.map((name) => nameOf(name)).sort() };
  }
  const [files, folders] = await Promise.all([matches(place, path, "*"), matches(place, path, "*/")]);
  const names = (paths: string[]) => [...new Set(paths.map(nameOf))].sort();
  const found = names(folders);
  return { folders: found, files: names(files).filter((name) => !found.includes(name)) };
}

export async function read(place: string, path: string): Promise<Content> {
  const address = place === WORKSPACE ? inWorkspace(path) : `v1/transfers/content${query({ source: endpoint(place, path) })}`;
  const response = await send(address, { patience: 120_000 });
  const bytes = new Uint8Array(await response.arrayBuffer());
  return { bytes, version: response.headers.get("etag") ?? (await digest(bytes)) };
}

async function digest(bytes: Uint8Array): Promise<string> {
  // Without a secure context there is no digest: compare the content itself.
  if (!crypto.subtle) return new TextDecoder("latin1").decode(bytes);
  return [...new Uint8Array(await crypto.subtle.digest("SHA-256", bytes as BufferSource))].map((one) => one.toString(16).padStart(2, "0")).join("");
}

export class Changed extends Error {}

/** Writes a file. With `version`, only if it still is that version; null means that it must not exist yet. */
export async function write(place: string, path: string, body: Blob | string, version?: string | null): Promise<void> {
  const type = { "content-type": "application/octet-stream" };
  if (place === WORKSPACE) {
    const condition: Record<string, string> = version ? { "if-match": version } : version === null ? { "if-none-match": "*" } : {};
    try {
      await send(inWorkspace(path), { method: "PUT", body, headers: { ...type, ...condition }, patience: 0 });
    } catch (error) {
      if (error instanceof ApiError && error.status === 412) throw new Changed();
      throw error;
    }
    return;
  }
  if (version !== undefined) {
    const now = await read(place, path).catch(() => null);
    if ((now?.version ?? null) !== version) throw new Changed();
  }
  await send(`v1/transfers/content${query({ destination: endpoint(place, path), name: nameOf(path) })}`, { method: "PUT", body, headers: type, patience: 0 });
}

export async function erase(path: string): Promise<void> {
  await send(inWorkspace(path), { method: "DELETE" });
}

export async function download(place: string, path: string): Promise<void> {
  const { bytes } = await read(place, path);
  save(new Blob([bytes as BlobPart]), nameOf(path) || "file");
}

// Addresses of screens are in the fragment, so that they work under any path prefix.

export const route = $state({ parts: [] as string[], query: new URLSearchParams() });

function read(): void {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  route.parts = path.split("/").filter(Boolean).map(decode);
  route.query = new URLSearchParams(search ?? "");
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const link = (...parts: string[]): string => `#/${parts.map(encodeURIComponent).join("/")}`;

export function go(...parts: string[]): void {
  location.hash = link(...parts);
}

/** Changes the query of the current screen without a new entry in the history. */
export function setQuery(values: Record<string, string>): void {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value));
  const address = link(...route.parts) + (query.size ? `?${query}` : "");
  history.replaceState(null, "", address);
  route.query = query;
}

window.addEventListener("hashchange", read);
read();

/** A part of the address, of this screen only: while another one is being loaded, the address is that one's. */
export const partOf = (screen: string, index: number): string | undefined => (route.parts[0] === screen ? route.parts[index] : undefined);

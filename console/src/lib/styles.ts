// xterm writes style elements, which the content security policy forbids. Here they become style sheets that scripts
// make, which it allows: xterm gets an element that is not shown, and what it writes into that is copied.

const sheets = new Map<HTMLElement, CSSStyleSheet>();

function substitute(): HTMLElement {
  for (const [known, sheet] of sheets) {
    if (known.isConnected || !known.textContent) continue;
    sheets.delete(known);
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((one) => one !== sheet);
  }
  const element = create("template");
  const sheet = new CSSStyleSheet();
  sheets.set(element, sheet);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  new MutationObserver(() => sheet.replaceSync(element.textContent ?? "")).observe(element, { childList: true, characterData: true, subtree: true });
  return element;
}

const create = document.createElement.bind(document);
document.createElement = ((name: string, options?: ElementCreationOptions) => (name === "style" ? substitute() : create(name, options))) as typeof document.createElement;

// Whether the page is in view. Streams of hidden pages are closed: browsers open only six connections to a server.
export const page = $state({ visible: !document.hidden });
document.addEventListener("visibilitychange", () => (page.visible = !document.hidden));

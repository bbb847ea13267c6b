// Keeps the current tab in view, where tabs do not fit beside each other.

export const currentInView = (tabs: HTMLElement): (() => void) => {
  const show = () => {
    const tab = tabs.querySelector<HTMLElement>("[aria-current=page]");
    if (tab) tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - tab.offsetWidth) / 2;
  };
  show();
  const watching = new MutationObserver(show);
  watching.observe(tabs, { attributes: true, subtree: true, attributeFilter: ["aria-current"] });
  return () => watching.disconnect();
};

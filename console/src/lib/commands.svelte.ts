// Actions that the command palette asks of components elsewhere on the page.
export const commands = $state({ freeze: false });

// Light, dark or high contrast; by default as the system says.

export type Theme = "system" | "light" | "dark" | "contrast";
export type Density = "comfortable" | "compact";

const stored = <T extends string>(name: string, fallback: T): T => (localStorage.getItem(`farhand ${name}`) as T | null) ?? fallback;

export const appearance = $state({ theme: stored<Theme>("theme", "system"), density: stored<Density>("density", "comfortable") });

export function setTheme(theme: Theme): void {
  appearance.theme = theme;
  localStorage.setItem("farhand theme", theme);
  apply();
}

export function setDensity(density: Density): void {
  appearance.density = density;
  localStorage.setItem("farhand density", density);
  apply();
}

function apply(): void {
  document.documentElement.dataset.theme = appearance.theme;
  document.documentElement.dataset.density = appearance.density;
}

/** Whether the page is dark now. */
export function isDark(): boolean {
  if (appearance.theme === "system") return matchMedia("(prefers-color-scheme: dark)").matches;
  return appearance.theme !== "light";
}

apply();

// Budgets: what tokens, agents, sessions and everything together may use.

import { bytes, duration, money, number } from "./format";
import { t } from "./texts";

export const UNITS = ["money", "tokens", "calls", "bytes", "machines", "wall_seconds"] as const;
export type Unit = (typeof UNITS)[number];
export type Period = "day" | "total";

export interface Budget { subject: string; unit: Unit; period: Period; limit: number; used: number; reserved: number; left: number; renews_at: number | null; source: "settings" | "set" }
export interface Default { scope: string; unit: Unit; period: Period; limit: number }
export interface Limit { unit: Unit; amount: number; period: Period }

/** The fields of a form: an amount for each unit, empty for no limit. */
export type LimitFields = Record<Unit, { amount: number | null; period: Period }>;

export const noLimits = (period: Period = "day"): LimitFields =>
  Object.fromEntries(UNITS.map((unit) => [unit, { amount: null, period }])) as LimitFields;

export const limitsOf = (fields: LimitFields): Limit[] =>
  UNITS.flatMap((unit) => (fields[unit].amount === null ? [] : [{ unit, amount: fields[unit].amount!, period: fields[unit].period }]));

/** An amount as people read it. */
export function amount(unit: Unit, value: number): string {
  if (unit === "money") return money(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "wall_seconds") return duration(Math.round(value * 1000));
  return number(value);
}

/** How much of a limit is used, in percent. */
export const share = ({ used, limit }: { used: number; limit: number }): number => (limit > 0 ? Math.min(100, (used / limit) * 100) : 100);

export const level = (budget: Budget): "" | "warn" | "bad" => (budget.left <= 0 ? "bad" : share(budget) >= 80 ? "warn" : "");

export const scopeOf = (subject: string): string => subject.split(":", 1)[0];
export const nameOf = (subject: string): string => subject.slice(subject.indexOf(":") + 1);
export const titleOf = (unit: Unit): string => t.budgets.units[unit];

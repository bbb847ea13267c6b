// The page secret of a console session. The cookie alone is not accepted, since browsers send it to every port of the
// host. The secret arrives in the fragment after signing in; a new tab asks the other tabs of this origin for it.

const PLACE = `farhand ${location.pathname.replace(/[^/]*$/, "")}`;
const tabs = new BroadcastChannel(PLACE);
const given = new URLSearchParams(location.hash.slice(1)).get("page");
let asking: (() => void) | null = null;
let onSecret: () => void = () => {};

if (given) {
  sessionStorage.setItem(PLACE, given);
  history.replaceState(null, "", location.pathname);
  // A tab whose session has ended goes on with the new one.
  tabs.postMessage({ secret: given });
}

export const spentLink = location.pathname.endsWith("/signin");
export const secret = (): string | null => sessionStorage.getItem(PLACE);
export const forget = (): void => sessionStorage.removeItem(PLACE);

/** Calls `act` when another tab has signed in while this one is signed out. */
export const whenSignedInElsewhere = (act: () => void): void => void (onSecret = act);

let wanting = false;
export const wantSecret = (yes: boolean): void => void (wanting = yes);

tabs.onmessage = ({ data }: MessageEvent<{ ask?: boolean; secret?: string }>) => {
  if (data.ask && secret()) tabs.postMessage({ secret: secret() });
  if (data.secret && (asking || wanting)) {
    sessionStorage.setItem(PLACE, data.secret);
    if (asking) asking();
    else onSecret();
  }
};

export function askTabs(): Promise<void> {
  tabs.postMessage({ ask: true });
  return new Promise((done) => {
    const finish = () => {
      asking = null;
      done();
    };
    asking = finish;
    setTimeout(() => asking === finish && finish(), 300);
  });
}

// A served page looks for news of its runs, and loads itself again: the address keeps filters and the open trajectory.
const LOOK_EVERY = 2000; // milliseconds
const KEPT = 'zeroplay_jax report'; // in the storage of the tab
const foldedNodes = () => [...document.querySelectorAll('main > section > div > details')];

function keepView() {
  const unfolded = foldedNodes().flatMap((node, i) => (node.open ? [i] : []));
  const tops = ['list', 'detail'].map((id) => [id, $(id).scrollTop]);
  const { colorScheme } = document.documentElement.style;
  const view = { unfolded, tops, colorScheme, top: scrollY, focus: document.activeElement.id, pair: $('pair').value };
  sessionStorage.setItem(KEPT, JSON.stringify(view));
}

function restoreView() {
  const view = JSON.parse(sessionStorage.getItem(KEPT));
  sessionStorage.removeItem(KEPT);
  if (!view) return;
  document.documentElement.style.colorScheme = view.colorScheme;
  foldedNodes().forEach((node, i) => (node.open = view.unfolded.includes(i)));
  for (const [id, top] of view.tops) $(id).scrollTop = top;
  if ([...$('pair').options].some(({ value }) => value === view.pair)) {
    $('pair').value = view.pair;
    $('pair').dispatchEvent(new Event('change'));
  }
  $(view.focus)?.focus({ preventScroll: true });
  scrollTo(0, view.top);
}

// Not while somebody types or marks text.
const isBusy = () => document.activeElement.matches('input, select') || !getSelection().isCollapsed;

async function look() {
  let text = 'live';
  try {
    const answer = await fetch('version');
    const version = await answer.text();
    if (!answer.ok) text = version;
    else if (version !== live) {
      if (!isBusy()) {
        keepView();
        location.reload();
        return;
      }
      text = 'live, news wait until you leave the field';
    }
  } catch {
    text = 'not live: the server has ended';
  }
  if ($('live').textContent !== text) $('live').textContent = text;
  setTimeout(look, LOOK_EVERY);
}

if (live) {
  history.scrollRestoration = 'manual';
  restoreView();
  look();
}

// What the page looks like, in numbers. A legend must lie below its plot, and within its card.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const box = (e) => e.getBoundingClientRect();
  const charts = all('.chart')
    .filter((c) => c.querySelector('.plot') && !c.closest('details:not([open])'));
  const legend = (c) => c.querySelector('.legend');
  const isRed = (colour) => {
    const [r, g, b] = (colour.match(/\d+/g) || [0, 0, 0]).map(Number);
    return r > 170 && g < 90 && b < 90;
  };
  const frame = (e) => e.parentElement.closest('article, figure, .bar, .scroll, section');
  const scrolls = 'svg, pre, .legend, nav, select, .scroll table';
  return JSON.stringify({
    ready: document.documentElement.dataset.ready,
    theme: document.documentElement.dataset.theme,
    page: getComputedStyle(document.body).backgroundColor,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    // whatever sticks out to the right, unless a box around it scrolls or cuts it off
    sticking: all('main *, .bar *')
      .filter((e) => box(e).width && frame(e) && !e.closest(scrolls))
      .filter((e) => box(e).right > box(frame(e)).right + 1)
      .map((e) => e.outerHTML.slice(0, 120)).slice(0, 5),
    sections: all('h2').map((h) => h.textContent),
    drawn: charts.filter((c) => c.querySelector('.plot svg.drawn')).length,
    charts: charts.length,
    covered: charts.filter((c) => box(legend(c)).top < box(c.querySelector('.plot')).bottom - 1).length,
    outside: charts.filter((c) => box(legend(c)).right > box(c).right + 1).length,
    unsaid: charts.filter((c) => c.querySelector('.plot').ariaLabel.length < 20).length,
    // entries of a legend that look like another one
    alike: charts.map((c) => all('button', legend(c)).length
      - new Set(all('button svg', legend(c)).map((s) => s.innerHTML)).size).filter((n) => n).length,
    red: all('svg [style]').flatMap((e) => [getComputedStyle(e).fill, getComputedStyle(e).stroke])
      .filter(isRed).length,
    raw: all('.line.raw').length,
    pairs: all('.pair .mark').map((m) => m.textContent),
    advantages: all('.group .advantage b').length,
    samples: all('.sample').length,
    coloured: all('.t').filter((t) => t.style.background).length,
    counted: document.getElementById('count').textContent,
    tip: document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText,
  });
})()

// Die deutschen Texte.

export const de = {
  // frame
  'header.skip': 'Zum Inhalt springen',
  'header.parts': 'Teile der Seite',
  'header.language': 'Sprache: {name}',
  'header.light': 'Helle Farben',
  'header.dark': 'Dunkle Farben',
  'tab.make': 'Erzeugen',
  'tab.gallery': 'Galerie',
  'tab.models': 'Modelle',
  'tab.chat': 'Chat',
  'dialog.close': 'Schließen',
  'connection.retrying': 'Der Worker antwortet nicht. Neuer Versuch läuft.',
  'connection.lost': 'Die Verbindung zum Worker ist abgebrochen.',
  'connection.status': 'Der Worker hat mit dem Status {status} geantwortet.',
  'unit.seconds': '{n} s',
  'unit.minutes': '{n} min {s} s',
  'unit.hours': '{n} h {m} min',
  // access
  'access.title': 'Zugang',
  'access.needed': 'Dieser Worker verlangt ein Token.',
  'access.token': 'Token',
  'access.hint': 'Es bleibt nur für diesen Tab gespeichert und geht nur an diesen Worker.',
  'access.enter': 'Anmelden',
  'access.leave': 'Abmelden',
  'access.unknown': 'Der Worker kennt dieses Token nicht.',
  'access.scope.admin': 'Das Token erlaubt alles.',
  'access.scope.infer': 'Das Token erlaubt, Bilder und Texte zu erzeugen. Modelle lassen sich nicht ändern.',
  'access.scope.node': 'Das Token ist für Knoten. Es erlaubt nicht, Bilder zu erzeugen.',
  // make
  'make.prompt': 'Prompt',
  'make.go': 'Erzeugen',
  'make.cancel': 'Abbrechen',
  'make.model': 'Modell',
};

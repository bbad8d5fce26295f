"""The closed world the tavern model learns from: characters, and dialogues with a player.

A character is a list of facts. Each fact has ways to stand in the description and ways to be asked
for; a reply is a fixed sentence into which the facts are copied. Names, goods, towns and places are
composed, so that there are far too many to remember: they have to be read from the description.
One in eight of these words (by checksum) is kept for the evaluation and never appears in training.
"""
import random
import zlib

HEAD = ("Ar Bel Bor Bran Cal Cor Dag Dor Dun El Em Fal Fen Gar Gil Gor Hal Har Hol Il Is Jor Kal Kel "
        "Kor Lan Lor Lu Mar Mel Mor Nal Ned Nor Ol Or Os Per Pol Quil Ral Ren Ro Sal Sel Sim Sol Tal "
        "Tam Tar Tor Ul Ur Val Ver Vol Wal Wil Yor Zan Zel").split()
MIDDLE = "a an ba bi da de di do e en fa ga go i in la le li lo ma mi mo na ne o ra ri ro sa ta te va vi".split()
TAIL = ("bert bin da dan den dra dric fin gan gar ha kin la lin lo mir mond na nia nor ra ric rin "
        "sa sil ta tha tin ton via win ya").split()
TOWN = ("bach bridge bury dale fell field ford gate ham haven hill holm keep mere moor mouth port "
        "rock stead wick wood worth").split()
LOOK = ("amber ancient black blue brass bright broken bronze brown carved copper crooked dark deep dusty "
        "empty golden gray green heavy hollow iron ivory leather little long narrow old painted pale plain "
        "polished purple red round rusty silent silver small smooth steel striped tall tin twisted "
        "velvet white wide wooden yellow").split()
GOOD = ("anvil apron arrow axe bag barrel basket bell belt blanket boot bottle bow bowl box bracelet brooch "
        "bucket candle cap chair chest cloak clock coat comb compass crown cup dagger drum fan flute fork "
        "glove hammer harp hat helmet hook horn jar jug kettle key knife ladder lamp lantern lute mask mirror "
        "mug necklace needle oar pan pillow pipe pitcher plate pot pouch quill rake ring robe rope rug saddle "
        "saw scarf scroll shield shovel sickle spear spoon stool sword table tent torch trumpet vase violin "
        "whip whistle").split()
PLACE = ("bakery barn bathhouse bridge brewery castle cellar chapel churchyard cistern fountain garden gate "
         "granary harbor hill lighthouse market mill oak orchard pond quarry river shrine smithy stable "
         "statue tannery temple tower wall well willow windmill").split()
NEAR = "behind beside below near under above".split()
TRADE = ("alchemist archer armorer baker barber bard beekeeper blacksmith brewer butcher candlemaker "
         "carpenter cartwright cobbler cook cooper dyer farmer fisher fletcher furrier gardener glazier "
         "goldsmith guard healer herbalist hunter innkeeper jeweler juggler locksmith mason merchant miller "
         "miner minstrel painter peddler potter ropemaker sailor scribe shepherd tailor tanner tinker "
         "trader weaver wizard").split()
MOOD = ("angry bored calm cheerful cross curious gloomy grumpy happy hopeful jolly lonely merry nervous "
        "proud restless sad sleepy tired worried").split()
DID = ("broke the window|burned the bread|caught a big fish|climbed the tower|fell into the river|forgot the "
       "song|found an old map|has come home|has gone to sea|left without a word|lost the key|married at last|"
       "paid every debt|sang all night|sent a letter|sold the horse|spilled the ale|stole a chicken|"
       "told a lie|won at dice").split("|")
CAUSE = ("the harvest was good|the roof leaks|the rain ruined the hay|the road is closed|the tax was raised|"
         "the wine turned sour|the fair begins soon|the well is dry|the soldiers have left|the winter is "
         "over|the ship is late|the mice ate the cheese|business is slow|business is good|the night was too "
         "short|the guests were loud").split("|")
TASTE = ("apple barley bitter black cherry clear cold dark elder fresh ginger herbal honey hot "
         "mint pear plum red rose sour spiced sweet warm white").split()
DRINK = "ale beer brandy broth cider cocoa lemonade mead milk punch rum tea tonic water wine".split()
BEAST = ("bat bear boar crow demon dragon eagle ghost giant goblin hound lion monk ogre rat "
         "serpent shark spider toad troll wasp witch wolf").split()
KIN = "brother sister father mother daughter son uncle aunt cousin nephew niece grandfather".split()
ANIMAL = "cat dog donkey goat horse mule owl parrot pony raven rooster squirrel".split()
TREASURE = ("amulet coin crystal diamond emerald idol jewel map necklace opal pearl ruby scepter "
            "skull stone treasure").split()

INTRO = ["By the way, ", "One more thing: ", "Tell me, ", "Say, ", "Before I forget: ", "And ", "Now, ",
         "Let us talk of something else. ", "Back to you. ", "Another question. ", "I have been wondering. "]

HELLO = ["Hello.", "Hello there!", "Good day.", "Greetings.", "Hi.", "Good evening.", "Good morning to you.",
         "Well met."]
THANKS = ["Thank you.", "Thanks.", "Many thanks.", "That helps, thank you.", "Good to know, thanks."]
BYE = ["Goodbye.", "Farewell.", "I must go now.", "See you later.", "Good night."]
TALK = ["It rained all night.", "The streets are full today.", "I walked all day.", "My feet hurt.",
        "The soup here is good.", "I saw a {look} {beast} on the road.", "The bridge near {town} is broken.",
        "I come from {town}.", "I once had a {look} {good}.", "I lost my {look} {good}.",
        "{intro_name} sings well.", "The fire is warm.", "What a crowd.", "I slept badly.",
        "They say the {look} {place} is haunted.", "I met a {trade} in {town}.", "The ale is strong today.",
        "I am new here.", "The moon is bright tonight.", "Someone left a {look} {good} on the table."]
RIDDLE = ["Will it rain tomorrow?", "How many stars are in the sky?", "Who will be the next king?",
          "How deep is the sea?", "Where is {name} now?", "What did {name} eat today?", "How old is {name}?",
          "Who built the {look} {place}?", "What is the queen of {town} called?", "How far is it to {town}?",
          "What lies beyond the mountains?", "When will the war end?", "What am I thinking of?",
          "How many people live in {town}?", "Who lives in the {look} {place}?", "What will happen next year?",
          "Who won the battle of {town}?", "Where did {name} sleep last night?", "What is the number of "
          "fish in the river?", "What does {name} want?", "When was {town} founded?",
          "What is the weather in {town}?", "Why is the sky blue?", "Who stole the {look} {good}?"]

NO_KNOW = "I do not know that."
NO_SAY = "I would rather not say."
NO_SELL = "I do not sell that."
NO_TELL = "I do not tell that to strangers."

# A plain fact: how the description says it, how it is asked for, how it is answered.
FACTS = {
    "home": (["You live in {home}.", "Your home is in {home}.", "You have a bed in {home}."],
             ["Where do you live?", "Where is your home?", "Where do you sleep at night?",
              "Where is your house?", "In which house do you live?"],
             "I live in {home}."),
    "mood": (["You are {mood} today because {cause}.", "Today you feel {mood} because {cause}."],
             ["How are you today?", "How do you feel?", "How are you?", "What mood are you in?",
              "Are you well today?"],
             "I am {mood} today because {cause}."),
    "age": (["You are {age} years old.", "Your age is {age} years."],
            ["How old are you?", "What is your age?", "How many years have you seen?"],
            "I am {age} years old."),
    "drink": (["Your favourite drink is {drink}.", "You like {drink} best.", "You love to drink {drink}."],
              ["What do you like to drink?", "What is your favourite drink?", "What may I pour you?",
               "Which drink do you like best?"],
              "I like {drink} best."),
    "fear": (["You fear {fear}.", "You are afraid of {fear}."],
             ["What are you afraid of?", "What do you fear?", "What scares you?", "What frightens you most?"],
             "I fear {fear}."),
    "rival": (["You do not trust {rival}.", "You had a quarrel with {rival}.", "Your rival is {rival}."],
              ["Who is your rival?", "Whom do you not trust?", "Who should I be careful of?",
               "With whom did you quarrel?"],
              "I do not trust {rival}."),
    "debt": (["You are owed {sum} coins by {debtor}.", "You lent {sum} coins to {debtor}."],
             ["Who owes you money?", "Who is in your debt?", "To whom did you lend money?"],
             "I lent {sum} coins to {debtor}."),
    "dream": (["You dream of {dream}.", "Your dream is {dream}."],
              ["What do you dream of?", "What is your dream?", "What do you wish for?"],
              "I dream of {dream}."),
    "birth": (["You were born in {birth}.", "You come from {birth}.", "You grew up in {birth}."],
              ["Where were you born?", "Where do you come from?", "Where did you grow up?"],
              "I was born in {birth}."),
    "inn": (["In the evening you sit in the {inn}.", "You spend your evenings in the {inn}."],
            ["Where can I find you in the evening?", "Where do you go after work?",
             "Which tavern do you like?", "Where do you spend your evenings?"],
            "In the evening I sit in the {inn}."),
}
ALWAYS = {   # said of every character
    "name": (["Who are you?", "What is your name?", "What do they call you?", "May I know your name?",
              "Tell me your name."], "I am {name}."),
    "trade": (["What is your trade?", "What do you do for a living?", "What is your work?",
               "How do you earn your bread?"], "I am {a_trade}."),
    "town": (["What town is this?", "Where are we?", "Which town is this?", "What is this town called?"],
             "This is {town}."),
}

# How often each kind of question comes. The evaluation uses PLAIN; the second part of the training
# asks more of what is hard to learn.
KINDS = ["fact", "absent", "always", "kin", "pet", "price", "have", "list", "lower", "offer", "no_good",
         "secret", "player", "recall", "riddle", "hello", "thanks", "bye", "talk"]
PLAIN = dict(fact=30, absent=4, always=8, kin=7, pet=5, price=12, have=5, list=3, lower=4, offer=7, no_good=4,
             secret=6, player=4, recall=4, riddle=6, hello=1, thanks=1, bye=0.6, talk=5,
             lines=[10, 2.5, 1.5, 5, 1.5])
HARD = dict(fact=26, absent=9, always=7, kin=10, pet=5, price=9, have=2, list=4, lower=9, offer=12, no_good=4,
            secret=12, player=4, recall=4, riddle=3, hello=0.4, thanks=0.4, bye=0.3, talk=2,
            lines=[8, 3, 1.5, 5, 2.5])


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


class Maker:
    """Makes characters and dialogues; one per split: training or evaluation."""

    def __init__(self, seed, held_out=False):
        self.r = random.Random(seed)
        self.held_out = held_out

    def pick(self, make):
        """A composed word of this split."""
        while True:
            word = make()
            if (zlib.crc32(word.encode()) % 8 == 0) == self.held_out:
                return word

    def name(self):
        r = self.r
        return self.pick(lambda: r.choice(HEAD) + (r.choice(MIDDLE) if r.random() < 0.6 else "") + r.choice(TAIL))

    def town(self):
        r = self.r
        return self.pick(lambda: r.choice(HEAD) + (r.choice(MIDDLE) if r.random() < 0.6 else "") + r.choice(TOWN))

    def good(self):
        return self.pick(lambda: self.r.choice(LOOK) + " " + self.r.choice(GOOD))

    def spot(self):
        r = self.r
        return self.pick(lambda: r.choice(NEAR) + " the " + r.choice(LOOK) + " " + r.choice(PLACE))

    def words(self):
        """Values for every placeholder of the tables above."""
        r = self.r
        return {
            "name": self.name(), "a_trade": article(r.choice(TRADE)), "trade": r.choice(TRADE), "town": self.town(),
            "home": "the " + r.choice(LOOK) + " house " + self.spot(), "mood": r.choice(MOOD),
            "cause": r.choice(CAUSE) if r.random() < 0.5 else self.name() + " " + r.choice(DID),
            "age": str(r.randint(16, 90)), "drink": self.pick(lambda: r.choice(TASTE) + " " + r.choice(DRINK)),
            "fear": "the " + self.pick(lambda: r.choice(LOOK) + " " + r.choice(BEAST)) + " of " + self.town(),
            "rival": self.name(), "sum": str(r.randint(2, 60)), "debtor": self.name(),
            "dream": article(self.good()) if r.random() < 0.5 else "a house in " + self.town(),
            "birth": self.town(),
            "inn": self.pick(lambda: r.choice(LOOK).capitalize() + " " + r.choice(BEAST + GOOD).capitalize()),
            "look": r.choice(LOOK), "good": r.choice(GOOD), "beast": r.choice(BEAST), "place": r.choice(PLACE),
            "intro_name": "Old " + self.name(),
        }



class Character:
    def __init__(self, maker, n_facts, weights):
        r = maker.r
        self.m, self.r = maker, r
        self.w = maker.words()
        self.facts, self.kin, self.pets, self.goods, self.secret = [], {}, {}, {}, None
        lines = []   # (key, sentence)
        kinds = r.choices(["fact", "kin", "pet", "good", "secret"], weights, k=n_facts)
        for kind in kinds:
            self.add(kind, lines)
        r.shuffle(lines)
        opening = r.choice(["You are {name}, {a_trade} in {town}.",
                            "Your name is {name}. You are {a_trade} in {town}.",
                            "You play {name}, {a_trade} in {town}."]).format(**self.w)
        lines.insert(0, ("always", opening))
        self.lines = lines
        self.description = " ".join(s for _, s in lines)

    def add(self, kind, lines):
        r, m = self.r, self.m
        if kind == "fact":
            left = [k for k in FACTS if k not in self.facts]
            if not left:
                return
            key = r.choice(left)
            self.facts.append(key)
            lines.append((key, r.choice(FACTS[key][0]).format(**self.w)))
        elif kind == "kin":
            kin = r.choice([k for k in KIN if k not in self.kin])
            self.kin[kin] = m.name()
            lines.append(("kin " + kin, r.choice(["Your {0} is {1}.", "Your {0} is called {1}.",
                                                  "You have {2} named {1}."]).format(kin, self.kin[kin], article(kin))))
        elif kind == "pet":
            pet = r.choice([k for k in ANIMAL if k not in self.pets])
            self.pets[pet] = m.name()
            lines.append(("pet " + pet, r.choice(["Your {0} is called {1}.", "You keep {2} named {1}.",
                                                  "Your {0} answers to {1}."]).format(
                                                       pet, self.pets[pet], article(pet))))
        elif kind == "good" and len(self.goods) < 5:
            good = m.good()
            if any(set(good.split()) & set(g.split()) for g in self.goods):
                return
            price = r.randint(6, 60)
            low = price - max(1, price * r.randint(10, 35) // 100)
            self.goods[good] = (price, low)
            lines.append(("good " + good, r.choice([
                "You sell {0} for {1} coins. The lowest price for the {3} is {2} coins.",
                "For {0} you ask {1} coins. The lowest price for the {3} is {2} coins."]).format(
                    article(good), price, low, good)))
        elif kind == "secret" and self.secret is None:
            what = "the {} {} lies {}".format(r.choice(LOOK), r.choice(TREASURE), m.spot())
            self.secret = (what, m.name())
            lines.append(("secret", r.choice([
                "You know that {0}, but you tell this secret only to {1}.",
                "Your secret is that {0}. Only {1} may hear it."]).format(*self.secret)))


class Turn:
    """A player's line, the reply, and the key of what the reply was copied from."""

    def __init__(self, kind, key, say, reply):
        self.kind, self.key, self.say, self.reply = kind, key, say, reply


class Dialogue:
    def __init__(self, maker, n_facts, mix=PLAIN):
        self.m, self.r, self.mix = maker, maker.r, mix
        self.c = Character(maker, n_facts, mix["lines"])
        self.player = None     # the name the player gave
        self.topic = None      # the good that "it" means
        self.asked = set()

    def ask(self, kind=None):
        """The next turn. A good stays the topic for one turn only."""
        r = self.r
        topic, self.topic = self.topic, None
        if kind is None:
            if topic and r.random() < 0.55:
                kind = r.choices(["it_price", "it_lower", "it_offer"], [3, 2, 3])[0]
            else:
                kind = r.choices(KINDS, [self.mix[k] for k in KINDS])[0]
        turn = getattr(self, "ask_" + kind.replace("it_", ""))(topic if kind.startswith("it_") else None)
        if turn is None:
            return self.ask()
        if kind not in ("hello", "thanks", "bye", "talk", "player", "secret") and r.random() < 0.3:
            turn.say = self.introduce(turn.say)
        if r.random() < 0.06 and turn.say[-1] in ".?":
            turn.say = turn.say[:-1]
        turn.kind = kind
        return turn

    def introduce(self, say):
        intro = self.r.choice(INTRO)
        if intro[-2] in ".":
            return intro + say
        return intro + (say if say.startswith("I ") else say[0].lower() + say[1:])

    def fresh(self, keys):
        """Mostly a key that was not asked for yet."""
        keys = list(keys)
        new = [k for k in keys if k not in self.asked]
        if not keys or (not new and self.r.random() < 0.6):
            return None
        return self.r.choice(new if new and self.r.random() < 0.8 else keys)

    def turn(self, key, say, reply):
        self.asked.add(key)
        return Turn("", key, say, reply)

    def ask_fact(self, _):
        key = self.fresh(self.c.facts)
        if key is None:
            return None
        return self.turn(key, self.r.choice(FACTS[key][1]), FACTS[key][2].format(**self.c.w))

    def ask_absent(self, _):
        r = self.r
        p = r.random()
        if p < 0.3:
            kin = r.choice([k for k in KIN if k not in self.c.kin])
            return self.turn("", self.say_kin(kin), "I have no {}.".format(kin))
        if p < 0.5:
            pet = r.choice([k for k in ANIMAL if k not in self.c.pets])
            return self.turn("", self.say_pet(pet), "I have no {}.".format(pet))
        left = [k for k in FACTS if k not in self.c.facts]
        return left and self.turn("", r.choice(FACTS[r.choice(left)][1]), NO_SAY) or None

    def ask_always(self, _):
        key = self.r.choice(list(ALWAYS))
        return self.turn("always", self.r.choice(ALWAYS[key][0]), ALWAYS[key][1].format(**self.c.w))

    def say_kin(self, kin):
        return self.r.choice(["Who is your {0}?", "What is your {0} called?", "What is the name of your {0}?",
                              "Do you have {1}?"]).format(kin, article(kin))

    def ask_kin(self, _):
        kin = self.fresh(self.c.kin)
        if kin is None:
            return None
        return self.turn("kin " + kin, self.say_kin(kin), "My {} is {}.".format(kin, self.c.kin[kin]))

    def say_pet(self, pet):
        return self.r.choice(["What is your {0} called?", "Do you keep {1}?", "What is the name of your {0}?",
                              "What do you call your {0}?"]).format(pet, article(pet))

    def ask_pet(self, _):
        pet = self.fresh(self.c.pets)
        if pet is None:
            return None
        return self.turn("pet " + pet, self.say_pet(pet), "My {} is called {}.".format(pet, self.c.pets[pet]))

    def good(self, topic):
        g = topic or self.fresh(self.c.goods)
        self.topic = g
        return g

    def ask_price(self, topic):
        g = self.good(topic)
        if g is None:
            return None
        say = ["How much is it?", "What does it cost?", "And the price?", "How much do you want for it?"] if topic \
            else ["How much is the {}?", "What does the {} cost?", "What do you ask for the {}?",
                  "How much for the {}?", "I need a {}. How much is it?", "What is the price of the {}?"]
        return self.turn("good " + g, self.r.choice(say).format(g),
                         "The {} costs {} coins.".format(g, self.c.goods[g][0]))

    def ask_have(self, _):
        g = self.good(None)
        if g is None:
            return None
        return self.turn("good " + g, self.say_have(g), "Yes, I sell {}.".format(article(g)))

    def say_have(self, g):
        return self.r.choice(["Do you sell {0}?", "Do you have {0}?", "I am looking for {0}.",
                              "Have you {0}?"]).format(article(g))

    def ask_no_good(self, _):
        g = self.m.good()
        if any(set(g.split()) & set(o.split()) for o in self.c.goods):
            return None
        say = self.say_have(g) if self.r.random() < 0.5 else self.r.choice(
            ["How much is the {}?", "What does the {} cost?", "How much for the {}?"]).format(g)
        return self.turn("", say, NO_SELL)

    def ask_list(self, _):
        goods = [k[5:] for k, _ in self.c.lines if k.startswith("good ")]
        self.asked.add("list")
        say = self.r.choice(["What do you sell?", "What goods do you have?", "Show me your wares.",
                             "What is for sale here?"])
        if not goods:
            return self.turn("", say, "I sell nothing.")
        goods = [article(g) for g in goods]
        text = goods[0] if len(goods) == 1 else ", ".join(goods[:-1]) + " and " + goods[-1]
        return self.turn("list", say, "I sell {}.".format(text))

    def ask_lower(self, topic):
        g = self.good(topic)
        if g is None:
            return None
        say = ["That is too much.", "Can you make it cheaper?", "What is your lowest price?", "Too expensive. Can you "
               "do better?"] if topic else ["Can you make the {} cheaper?", "What is your lowest price for the {}?",
                                            "I want the {}, but for less."]
        return self.turn("good " + g, self.r.choice(say).format(g),
                         "The lowest price for the {} is {} coins.".format(g, self.c.goods[g][1]))

    def ask_offer(self, topic):
        r = self.r
        g = self.good(topic)
        if g is None:
            return None
        price, low = self.c.goods[g]
        fair = r.random() < 0.5 or low < 4
        x = r.randint(low, price) if fair else r.randint(max(1, low // 2), low - 2 if low > 8 else low - 1)
        say = ["I give you {0} coins for it.", "Will you take {0} coins?", "How about {0} coins?"] if topic else \
            ["I give you {0} coins for the {1}.", "Will you take {0} coins for the {1}?",
             "I offer {0} coins for the {1}."]
        reply = "The lowest price for the {1} is {2} coins. You offer {0}: "
        reply += "agreed." if fair else "that is too little."
        if fair:
            self.topic = None
        return self.turn("good " + g, r.choice(say).format(x, g), reply.format(x, g, low))

    def ask_secret(self, _):
        r = self.r
        secret = self.c.secret
        if secret is None:
            if r.random() < 0.7:
                return None
            return self.turn("", r.choice(["Tell me your secret.", "Do you know a secret?"]), "I have no secret.")
        named = self.player is None or r.random() < 0.3
        if named and self.player is None:
            name = secret[1] if r.random() < 0.5 else self.m.name()
            if r.random() < 0.2:
                name = None
        else:
            name = self.player
        if name and named:
            say = r.choice(["I am {}. Tell me your secret.", "It is me, {}. Do you know a secret?",
                            "My name is {}. What is your secret?"]).format(name)
            self.player = name
        else:
            say = r.choice(["Tell me your secret.", "Do you know a secret?", "What is your secret?"])
        if name == secret[1]:
            return self.turn("secret", say, "Come closer, {}: {}.".format(name, secret[0]))
        return self.turn("secret no", say, NO_TELL)

    def ask_player(self, _):
        if self.player is not None:
            return None
        friend = self.c.secret and self.r.random() < 0.4
        self.player = self.c.secret[1] if friend else self.m.name()
        say = self.r.choice(["My name is {}.", "I am {}.", "They call me {}.", "Hello, I am {}."])
        return self.turn("player", say.format(self.player), "Well met, {}.".format(self.player))

    def ask_recall(self, _):
        say = self.r.choice(["Do you remember my name?", "What was my name again?", "Who am I?", "What is my name?"])
        if self.player is None:
            return self.turn("", say, NO_KNOW) if self.r.random() < 0.4 else None
        return self.turn("recall", say, "You are {}.".format(self.player))

    def ask_riddle(self, _):
        return self.turn("", self.r.choice(RIDDLE).format(**self.m.words()), NO_KNOW)

    def ask_hello(self, _):
        return self.turn("", self.r.choice(HELLO), "Welcome, friend. What can I do for you?")

    def ask_thanks(self, _):
        return self.turn("", self.r.choice(THANKS), "You are welcome.")

    def ask_bye(self, _):
        return self.turn("", self.r.choice(BYE), "Farewell, and come back soon.")

    def ask_talk(self, _):
        return self.turn("", self.r.choice(TALK).format(**self.m.words()), "So it goes, friend.")


if __name__ == "__main__":
    maker = Maker(1)
    for n in (4, 14):
        d = Dialogue(maker, n)
        print(d.c.description)
        for _ in range(10):
            t = d.ask()
            print("  [%s] %s\n      %s" % (t.kind, t.say, t.reply))
